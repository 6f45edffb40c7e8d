"""Takes a model off the GPU and back, in the engine's process: vLLM's sleep levels, verified by the memory.

vLLM users report sleeps that return and hold the memory, and wakes that run out of it. So each one is checked against the devices' figures;
on a mismatch `SleepFailed` is raised, and the agent ends the process and starts a fresh one.

A sleeping engine takes no deeper level: vLLM answers that it sleeps already, and level 2 after level 1 would leave the weights in host
memory (`Executor.sleep`). And pinned host memory that a wake empties stays with the process until `give_back`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FREED_SHARE = 0.9
"""Share of the memory of weights and KV that a sleep must free: the rest is rounding of the allocator that it cannot return."""

LEAST_SHARE = 0.4
"""Share of the expected weights (by their files) and KV that vLLM must count as freed by a sleep. Files of float32 take half."""

SETTLE_S = 5.0
POLL_S = 0.05
"""Longest wait for freed memory, and time between readings."""

WEIGHTS_LEVEL = 1

EXTENSION = "qlm_agent.engines.vllm.runner.sleeping.WorkerMemory"
"""For `EngineArgs.worker_extension_cls`: vLLM makes it a base of its worker class."""


class SleepFailed(RuntimeError):
    """The engine is not as asleep, or as awake, as it says."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device. `free_bytes`: by the device; `held_bytes`: the engine's memory that a sleep can free."""

    free_bytes: int
    held_bytes: int


class WorkerMemory:
    """Calls to vLLM's workers by `collective_rpc`. Its names must be ours alone; answers are plain lists, since they may cross a socket."""

    def qlm_memory(self) -> list[int]:
        """Free bytes on this worker's device, and its engine's bytes that a sleep can free. On a CPU: free bytes of the host, and 0."""
        import torch

        if not torch.cuda.is_available():
            return [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0]
        from vllm.device_allocator import get_mem_allocator_instance

        free, _ = torch.cuda.mem_get_info()
        return [int(free), int(get_mem_allocator_instance().get_current_usage())]

    def qlm_give_back(self) -> None:
        """Frees unused pinned host memory. PyTorch otherwise keeps it after a wake."""
        import torch

        if torch.cuda.is_available():
            torch.accelerator.empty_host_cache()


class SleepingModel:
    """`engine`: vllm's, with `sleep`, `wake_up` and `collective_rpc`. `expected_bytes`: of weights (their files) and KV on each device.
    Each worker reads its own: with tensor parallelism all of them, and no process that computes nothing opens a device."""

    def __init__(
        self,
        engine: Any,
        *,
        expected_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine = engine
        self._expected_bytes = expected_bytes
        self._clock = clock
        self._wait = wait
        self._freed: Sequence[int] = ()  # bytes on each device, by the sleep that lasts

    def sleep(self, level: int) -> int:
        """Level 1: weights to host memory; 2: dropped. Returns the bytes freed, on the device with the least. Raises SleepFailed; an engine
        that sleeps stays unchanged."""
        if self._freed:
            raise SleepFailed("it sleeps already, and vLLM takes a sleeping engine no deeper")
        before = self._read()
        known = min(each.held_bytes for each in before)
        if known < LEAST_SHARE * self._expected_bytes:
            raise SleepFailed(f"vLLM would free {known:,} bytes of about {self._expected_bytes:,} by sleeping: weights or KV are elsewhere")
        self._engine.sleep(level=level, mode="keep")  # requests in host memory stay
        wanted = [int(FREED_SHARE * each.held_bytes) for each in before]
        freed = self._freed_since(before, wanted)
        for number, (got, least) in enumerate(zip(freed, wanted, strict=True)):
            if got < least:
                raise SleepFailed(f"sleep level {level} gave {got:,} bytes of {least:,} back on device {number}: the memory is still held")
        self._freed = freed
        if level > WEIGHTS_LEVEL:
            self.give_back()  # of earlier sleeps at level 1
        return min(freed)

    def wake(self, level: int, weights: str) -> None:
        """Wakes the engine; after level 2 the weights are read again. Raises SleepFailed, and vLLM's errors."""
        before = self._read()
        for number, (device, freed) in enumerate(zip(before, self._freed, strict=True)):
            if device.free_bytes < FREED_SHARE * freed:
                raise SleepFailed(
                    f"{device.free_bytes:,} bytes are free on device {number}, and the model needs {freed:,}: another process took them"
                )
        if level > WEIGHTS_LEVEL:  # weights before KV: reading them needs temporary room
            self._engine.wake_up(tags=["weights"])
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": weights})
            self._engine.wake_up(tags=["kv_cache"])
        else:
            self._engine.wake_up()
        if self._engine.is_sleeping():
            raise SleepFailed("the engine says that it sleeps after it was woken")
        for number, (was, now, freed) in enumerate(zip(before, self._read(), self._freed, strict=True)):
            taken = was.free_bytes - now.free_bytes
            if taken < FREED_SHARE * freed:
                raise SleepFailed(f"waking took {taken:,} bytes of {freed:,} on device {number}: weights or KV are not there")
        self._freed = ()

    def give_back(self) -> None:
        """Frees host memory that a wake left with the process."""
        self._engine.collective_rpc("qlm_give_back")

    def _read(self) -> Sequence[DeviceMemory]:
        """The memory of each device, in a fixed order."""
        return [DeviceMemory(int(free), int(held)) for free, held in self._engine.collective_rpc("qlm_memory")]

    def _freed_since(self, before: Sequence[DeviceMemory], wanted: Sequence[int]) -> Sequence[int]:
        """The bytes freed on each device, once they suffice or the time is over."""
        deadline_s = self._clock() + SETTLE_S
        while True:
            freed = [now.free_bytes - was.free_bytes for was, now in zip(before, self._read(), strict=True)]
            if all(got >= least for got, least in zip(freed, wanted, strict=True)) or self._clock() >= deadline_s:
                return freed
            self._wait(POLL_S)
