"""A model that leaves the GPU and comes back, in the engine's process: vLLM's sleep levels, with the memory looked at and not believed.

vLLM users report sleeps that return and hold the memory, and wakes that run out of it. So each one is checked against what the device says;
where it is not as it should be, `SleepFailed` is raised, and the agent ends the process and starts a fresh one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

FREED_SHARE = 0.9
"""Of the memory that weights and KV take, that a sleep must give back: the rest is the context of the device and its libraries."""

SETTLE_S = 5.0
POLL_S = 0.05
"""How long memory may take to be given back, and how often it is looked at meanwhile."""

WEIGHTS_LEVEL = 1


class SleepFailed(RuntimeError):
    """The engine is not as asleep, or as awake, as it says."""


class DeviceProbe(Protocol):
    """What the device itself says."""

    def free_bytes(self) -> int: ...


class CudaProbe:
    """The GPU of this process."""

    def free_bytes(self) -> int:
        import torch

        free, _ = torch.cuda.mem_get_info()
        return int(free)


class SleepingModel:
    """`engine`: vllm's, with `sleep`, `wake_up` and `collective_rpc`. `held_bytes`: of weights and KV on the device."""

    def __init__(
        self,
        engine: Any,
        probe: DeviceProbe,
        *,
        held_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = engine
        self._probe = probe
        self._held_bytes = held_bytes
        self._clock = clock
        self._wait = wait
        self._freed_bytes = 0  # by the sleep that lasts

    def sleep(self, level: int) -> int:
        """Level 1: weights to host memory; 2: dropped. Returns the bytes that are free for it. Raises SleepFailed."""
        before = self._probe.free_bytes()
        self._engine.sleep(level=level, mode="keep")  # requests in host memory stay
        wanted = int(FREED_SHARE * self._held_bytes) - self._freed_bytes
        freed = self._freed(before, wanted)
        if freed < wanted:
            raise SleepFailed(f"sleep level {level} gave {freed:,} bytes back of {wanted:,}: the memory is still held")
        self._freed_bytes += max(0, freed)
        return self._freed_bytes

    def wake(self, level: int, weights: str) -> None:
        """Back to serving; after level 2 the weights are read again. Raises SleepFailed, and what vLLM raises."""
        free = self._probe.free_bytes()
        if free < FREED_SHARE * self._freed_bytes:
            raise SleepFailed(f"{free:,} bytes are free on the device, and the model needs {self._freed_bytes:,}: somebody else took them")
        self._engine.wake_up()
        if level > WEIGHTS_LEVEL:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": weights})
        if self._engine.is_sleeping():
            raise SleepFailed("the engine says that it sleeps after it was woken")
        taken = free - self._probe.free_bytes()
        if taken < FREED_SHARE * self._freed_bytes:
            raise SleepFailed(f"waking took {taken:,} bytes of {self._freed_bytes:,}: weights or KV are not there")
        self._freed_bytes = 0

    def _freed(self, before: int, wanted: int) -> int:
        """What was given back, once it is enough or the time is over."""
        deadline_s = self._clock() + SETTLE_S
        while (freed := self._probe.free_bytes() - before) < wanted and self._clock() < deadline_s:
            self._wait(POLL_S)
        return freed
