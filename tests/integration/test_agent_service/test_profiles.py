"""Displacement of requests follows the figures measured on the agent's GPUs and published in the queue (QLM section 5, figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_process.wire.profile import to_body
from qlm_queue.values import ESTIMATOR_ROLE

from .rig import Rig, until

GPU, PROFILE = "H100-80GB", "Mistral-7B"
SHIPPED = next(row for row in shipped_snapshot().hardware if row.key == (GPU, 1, PROFILE))


def published(version: int, rows: Sequence[HardwareProfile]) -> bytes:
    return to_body(ProfileSnapshot(version=version, made_s=1.0, hardware=tuple(rows)))


async def test_measured_rows_decide_how_requests_are_displaced(rig: Rig) -> None:
    agent = await rig.agent(simulated={"time_scale": 2.0})
    shell = agent.process.shell
    names = await rig.accept(1)
    await rig.place(names, group="g")

    def choice() -> str:
        return shell.load().eviction_choice

    await until(lambda: choice().startswith("KV swap at any context"), "a model is active, and the shipped row decides")
    lease = await rig.queue.acquire_lease(ESTIMATOR_ROLE, "e", 600.0, "")
    assert lease is not None
    measured = replace(SHIPPED, origin="measured", kv_swap_us_per_token=500.0, recompute_us_per_token=8.0)
    others = [
        replace(measured, gpu="A100-80GB", recompute_us_per_token=1.0),
        replace(measured, instance="b", recompute_us_per_token=2.0),
        replace(measured, n_gpu=2, recompute_us_per_token=3.0),
    ]
    await rig.queue.publish_profiles(lease, 5, published(5, [*others, measured]))
    await until(lambda: choice().startswith("evict at any context"), "the measured row decides")
    assert "there and back 500 us a token, computed again 4 us a token" in choice()  # by the agent's clock, which runs twice as fast
    await rig.queue.publish_profiles(lease, 6, b"\xff\xff\xff")
    await rig.queue.publish_profiles(lease, 7, published(7, others))
    await until(lambda: choice().startswith("KV swap at any context"), "without it the shipped row decides again")
