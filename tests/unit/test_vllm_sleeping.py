"""Sleep and wake, checked against a device that a test owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from qlm_agent.engines.vllm.runner.sleeping import SleepFailed, SleepingModel

HELD = 1_000
TOTAL = 1_500


@dataclass
class Device:
    """Memory and an engine on it. `keeps`: of its memory in a sleep; `late`: looks until the memory is given back; `known`: what vLLM says
    that a sleep frees; `pinned`: host memory that nobody uses."""

    free: int = TOTAL - HELD
    keeps: int = 0
    late: int = 0
    gets: int = HELD
    known: int = HELD
    stays_asleep: bool = False
    asleep: bool = False
    reloaded: list[str] = field(default_factory=list)
    woken: list[str] = field(default_factory=list)
    pinned: int = 0
    pending: int = 0
    now_s: float = 0.0

    def memory(self) -> list[tuple[int, int]]:
        if self.pending and self.late <= 0:
            self.free, self.pending = self.free + self.pending, 0
        self.late -= 1
        return [(self.free, self.known)]

    def sleep(self, *, level: int, mode: str) -> None:
        assert mode == "keep", "vLLM aborts all requests otherwise"
        if not self.asleep:
            self.pending = HELD - self.keeps
        self.asleep = True

    def wake_up(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        self.woken += tags
        if len(self.woken) % 2 == 0:  # all of it
            self.free -= self.gets
            self.pinned = HELD
            self.asleep = self.stays_asleep

    def is_sleeping(self) -> bool:
        return self.asleep

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[tuple[int, int]]:
        if method == "qlm_memory":
            return self.memory()
        if method == "qlm_give_back":
            self.pinned = 0
            return []
        assert kwargs is not None
        assert self.woken[-1] == "weights", "they are read where they are to be, and before KV takes the room"
        self.reloaded.append(kwargs["weights_path"])
        return []

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def model_on(device: Device) -> SleepingModel:
    return SleepingModel(device, expected_bytes=HELD, clock=lambda: device.now_s, wait=device.wait)


class TwoDevices(Device):
    """The engine's other GPU, which does what it should."""

    def memory(self) -> list[tuple[int, int]]:
        return [(TOTAL if self.asleep else TOTAL - HELD, HELD), *super().memory()]


@pytest.mark.parametrize("late", [0, 20])
def test_a_model_sleeps_and_wakes(late: int) -> None:
    device = Device(late=late)
    model = model_on(device)
    assert model.sleep(1) == HELD
    model.wake(1, "w")
    assert (device.free, device.reloaded) == (TOTAL - HELD, [])
    assert model.sleep(2) == HELD
    model.wake(2, "w")
    assert device.reloaded == ["w"]


def test_a_sleeping_model_sleeps_no_deeper() -> None:
    """vLLM would say nothing, and keep the weights in host memory."""
    model = model_on(Device())
    model.sleep(1)
    with pytest.raises(SleepFailed, match="no deeper"):
        model.sleep(2)


def test_host_memory_of_earlier_sleeps_is_given_back() -> None:
    device = Device()
    model = model_on(device)
    model.sleep(1)
    model.wake(1, "w")
    assert device.pinned == HELD
    model.sleep(2)
    assert device.pinned == 0
    device.pinned = 5
    model.give_back()
    assert device.pinned == 0


def test_a_model_that_vllm_does_not_keep_where_it_can_be_freed_is_noticed() -> None:
    with pytest.raises(SleepFailed, match="vLLM would free 300 bytes of about 1,000"):
        model_on(Device(known=300)).sleep(1)


def test_each_gpu_of_an_engine_is_looked_at() -> None:
    model = model_on(TwoDevices())
    assert model.sleep(1) == HELD
    model.wake(1, "w")
    with pytest.raises(SleepFailed, match="on device 1: the memory is still held"):
        model_on(TwoDevices(keeps=200)).sleep(1)
    device = TwoDevices(gets=100)
    model = model_on(device)
    model.sleep(1)
    with pytest.raises(SleepFailed, match="on device 1: weights or KV are not there"):
        model.wake(1, "w")


def test_memory_that_is_still_held_is_noticed() -> None:
    device = Device(keeps=200)
    with pytest.raises(SleepFailed, match="still held"):
        model_on(device).sleep(1)
    assert device.now_s >= 5.0


def test_a_wake_needs_its_memory() -> None:
    device = Device()
    model = model_on(device)
    model.sleep(1)
    device.free -= 800
    with pytest.raises(SleepFailed, match="another process"):
        model.wake(1, "w")


@pytest.mark.parametrize(("fault", "said"), [({"gets": 100}, "not there"), ({"stays_asleep": True}, "says that it sleeps")])
def test_a_wake_that_is_none_is_noticed(fault: dict[str, Any], said: str) -> None:
    device = Device(**fault)
    model = model_on(device)
    model.sleep(1)
    with pytest.raises(SleepFailed, match=said):
        model.wake(1, "w")
