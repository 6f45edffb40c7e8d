"""The row of a small model on a CPU, as `qlm profile` measured SmolLM2-135M there: what simulated engines of waits and loads go by."""

from __future__ import annotations

from qlm_core.profiles.hardware_profile import HardwareProfile

ROW = HardwareProfile(
    gpu="CPU",
    n_gpu=1,
    model="small",
    weights_gb=0.27,
    kv_bytes_per_token=23_040,
    kv_capacity_tokens=21_664,
    decode_a_ms=15.2,
    decode_b_ms_per_seq=0.54,
    decode_c_ms_per_context_token=0.0029,
    prefill_base_ms=24.0,
    prefill_ms_per_token=0.47,
    prefill_ms_per_token_squared=0.00032,
    load_disk_to_cpu_s=3.4,
    load_cpu_to_gpu_s=0.004,
    kv_swap_us_per_token=3.4,
    recompute_us_per_token=744.0,
    origin="measured",
)
