"""The comparison of the simulator with vLLM: its workload, its figures, and that the measured row decides what happens in virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from benchmarks.agent.measured_cluster import MODEL, OUTPUT_TOKENS, SEATS, MeasuredAgent, TimedRequest
from benchmarks.agent.model_config import INSTANCE, QUEUE
from benchmarks.agent.simulating import (
    OVERLOAD,
    RequestTimes,
    in_virtual_time,
    relative_error,
    side,
    workload,
)

from qlm_agent.config import AgentConfig
from qlm_core.profiles.hardware_profile import ORIGIN_MEASURED, HardwareProfile

ROW = HardwareProfile(
    gpu="CPU",
    n_gpu=1,
    model="bench-m",
    weights_gb=0.005,
    kv_bytes_per_token=2048,
    kv_capacity_tokens=240_000,
    decode_a_ms=2.0,
    decode_b_ms_per_seq=0.15,
    decode_c_ms_per_context_token=0.0001,
    prefill_base_ms=2.5,
    prefill_ms_per_token=0.03,
    load_disk_to_cpu_s=4.0,
    load_cpu_to_gpu_s=0.01,
    kv_swap_us_per_token=5.0,
    recompute_us_per_token=30.0,
    origin=ORIGIN_MEASURED,
)


def measured(row: HardwareProfile) -> MeasuredAgent:
    model = {"name": MODEL, "profile": ROW.model, "weights": "nowhere", "context_tokens_max": 1024, "vocabulary_size": 2048}
    agent = {"name": INSTANCE, "gpu": "CPU", "engine": "vllm", "batch_max": SEATS}
    config = AgentConfig.model_validate({"queue": {"name": QUEUE}, "models": [model], "agent": agent})
    return MeasuredAgent(config=config, alone=row, row=row)


def test_a_workload_arrives_faster_than_it_is_served() -> None:
    requests = workload(2_000, 1, 0.1)
    assert requests == workload(2_000, 1, 0.1)
    assert requests != workload(2_000, 2, 0.1)
    assert requests[-1].at_s / len(requests) == pytest.approx(0.1 / OVERLOAD, rel=0.1)
    assert len({request.slo_s for request in requests}) == 2
    assert fmean(request.output_tokens for request in requests) == pytest.approx(sum(OUTPUT_TOKENS) / 2, rel=0.05)


def test_figures_of_a_side() -> None:
    requests = [TimedRequest(at_s=0.0, output_tokens=1, slo_s=slo_s) for slo_s in (1.0, 2.0, 3.0, 4.0)]
    times = [RequestTimes(wait_s=wait_s, latency_s=2.5) for wait_s in (0.0, 1.0, 2.0, 3.0)]
    found = side(requests, times)
    assert (found.attainment, found.wait_p50_s) == (0.5, 1.5)
    assert found.wait_p99_s == pytest.approx(2.97)
    assert relative_error(1.2, 1.0) == pytest.approx(0.2)


def test_in_virtual_time_the_row_says_how_fast_it_goes(tmp_path: Path) -> None:
    requests = workload(40, 3, measured(ROW).request_s)

    def mean_wait_s(row: HardwareProfile) -> float:
        agent = measured(row)
        times = in_virtual_time(requests, agent.write(tmp_path), agent.profiles, 1)
        assert len(times) == len(requests)
        assert all(0.0 < each.wait_s < each.latency_s for each in times)
        return fmean(each.wait_s for each in times)

    slower = replace(ROW, decode_a_ms=2 * ROW.decode_a_ms, decode_b_ms_per_seq=2 * ROW.decode_b_ms_per_seq)
    quick_s = mean_wait_s(ROW)
    assert quick_s == mean_wait_s(ROW)
    assert quick_s < 4.0  # the model's load is no part of it
    assert mean_wait_s(slower) > 1.5 * quick_s
