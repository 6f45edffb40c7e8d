"""An asyncio loop whose clock jumps to the next timer instead of waiting: what is timed on it takes no time, and does not depend on how
busy the machine is."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")

TURN_S = 20e-6
"""The least time of a turn of the loop, so that pollers advance."""


class _Jumping(selectors.DefaultSelector):
    """Never waits for a timer."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0.0 if timeout is not None else None)
        self.now_s += TURN_S if found or timeout is None else max(timeout, TURN_S)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its `time()` starts at 0."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def in_virtual_time(work: Callable[[Callable[[], float]], Awaitable[Result]]) -> Result:
    """Result of `work`, given the loop's clock."""

    async def whole() -> Result:
        return await work(asyncio.get_running_loop().time)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(whole())
