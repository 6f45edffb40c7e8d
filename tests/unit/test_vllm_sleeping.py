"""Sleep and wake, checked against a device that a test owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from qlm_agent.vllm.sleeping import SleepFailed, SleepingModel

HELD = 1_000
TOTAL = 1_500


@dataclass
class Device:
    """Memory and an engine on it. `keeps`: of its memory in a sleep; `late`: looks until the memory is given back."""

    free: int = TOTAL - HELD
    keeps: int = 0
    late: int = 0
    gets: int = HELD
    stays_asleep: bool = False
    asleep: bool = False
    reloaded: list[str] = field(default_factory=list)
    pending: int = 0
    now_s: float = 0.0

    def free_bytes(self) -> int:
        if self.pending and self.late <= 0:
            self.free, self.pending = self.free + self.pending, 0
        self.late -= 1
        return self.free

    def sleep(self, *, level: int, mode: str) -> None:
        assert mode == "keep", "vLLM aborts all requests otherwise"
        if not self.asleep:
            self.pending = HELD - self.keeps
        self.asleep = True

    def wake_up(self) -> None:
        self.free -= self.gets
        self.asleep = self.stays_asleep

    def is_sleeping(self) -> bool:
        return self.asleep

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.reloaded.append(kwargs["weights_path"])

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def model_on(device: Device) -> SleepingModel:
    return SleepingModel(device, device, held_bytes=HELD, clock=lambda: device.now_s, wait=device.wait)


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


def test_a_warm_model_becomes_cold_without_freeing_twice() -> None:
    device = Device()
    model = model_on(device)
    model.sleep(1)
    assert model.sleep(2) == HELD


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
    with pytest.raises(SleepFailed, match="somebody else"):
        model.wake(1, "w")


@pytest.mark.parametrize(("fault", "said"), [({"gets": 100}, "not there"), ({"stays_asleep": True}, "says that it sleeps")])
def test_a_wake_that_is_none_is_noticed(fault: dict[str, Any], said: str) -> None:
    device = Device(**fault)
    model = model_on(device)
    model.sleep(1)
    with pytest.raises(SleepFailed, match=said):
        model.wake(1, "w")
