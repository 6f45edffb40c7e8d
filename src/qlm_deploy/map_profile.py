"""The hardware profile of a device map: what the estimator needs to predict an instance that runs it."""

from __future__ import annotations

import math

from qlm_core.profiles.hardware_prior import DISK_GB_S, EFFICIENCY, TRANSFER_S, decode_terms, prefill_terms
from qlm_core.profiles.hardware_profile import ORIGIN_MEASURED, HardwareProfile
from qlm_core.vocabulary.errors import ConfigError
from qlm_deploy.plan import Plan
from qlm_deploy.stages import GIB_PER_GB, Demand, layer_time_ms, roofline_token_ms
from qlm_deploy.topology import Topology


def gpu_name(topology: Topology, plan: Plan) -> str:
    """The `gpu` of the instance: unlike any row's of tensor-parallel GPUs, whose steps are faster."""
    gpus = {device.name: device.gpu or device.name for device in topology.devices}
    return "pipeline-" + "+".join(dict.fromkeys(gpus[stage.device] for stage in plan.stages))


def profile_of_map(topology: Topology, demand: Demand, plan: Plan) -> HardwareProfile:
    """The stages' shares of the roofline, one after the other: a step visits each, and a batch is not cut into pieces. A device is as much
    slower at everything as at its token (`token_ms`, `speed_share`). Hops are in `decode_a_ms`; a further sequence adds under 1 us to one,
    which is left out. KV: of the stage that has the least room. The row is a prediction, marked as measured so that it can be imported.

    Raises ConfigError for a device whose card is not known."""
    devices = {device.name: device for device in topology.devices}
    terms = [0.0] * 6
    kv_tokens, load_s, host_gb_s = math.inf, 0.0, math.inf
    layer_gb = demand.facts.weights_gb / demand.facts.layers
    for stage in plan.stages:
        device = devices[stage.device]
        if device.card is None:
            raise ConfigError(f"device {device.name}: gpu: must be known, or have bandwidth_gb_s and tflops, for a profile of the map")
        slowness = layer_time_ms(device, demand) * demand.facts.layers / roofline_token_ms(device.card, demand)
        share = slowness * stage.layers / demand.facts.layers
        found = (*decode_terms(device.card, 1, demand.facts), *prefill_terms(device.card, 1, demand.facts))
        terms = [total + share * term for total, term in zip(terms, found, strict=True)]
        room_gb = stage.usable_gib / GIB_PER_GB - stage.layers * layer_gb
        kv_tokens = min(kv_tokens, room_gb * 1e9 * demand.facts.layers / (stage.layers * demand.facts.kv_bytes_per_token))
        link_gb_s = EFFICIENCY.host_share * device.card.host_gb_s
        load_s, host_gb_s = max(load_s, stage.layers * layer_gb / link_gb_s), min(host_gb_s, link_gb_s)
    a_ms, sequence_ms, context_token_ms, base_ms, prefill_ms, squared_ms = terms
    return HardwareProfile(
        gpu=gpu_name(topology, plan),
        n_gpu=len(plan.stages),
        model=demand.model,
        weights_gb=demand.facts.weights_gb,
        kv_bytes_per_token=demand.facts.kv_bytes_per_token,
        kv_capacity_tokens=math.floor(kv_tokens),
        decode_a_ms=a_ms + plan.hops_ms,
        decode_b_ms_per_seq=sequence_ms,
        decode_c_ms_per_context_token=context_token_ms,
        prefill_base_ms=base_ms + plan.hops_ms,
        prefill_ms_per_token=prefill_ms,
        prefill_ms_per_token_squared=squared_ms,
        load_disk_to_cpu_s=demand.facts.weights_gb / DISK_GB_S,
        load_cpu_to_gpu_s=TRANSFER_S + load_s,
        kv_swap_us_per_token=demand.facts.kv_bytes_per_token / host_gb_s * 1e-3,
        recompute_us_per_token=prefill_ms * 1e3,
        origin=ORIGIN_MEASURED,
    )
