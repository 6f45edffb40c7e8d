"""Runs a coroutine as a program's whole work: SIGTERM ends it as Ctrl-C does, through its own `finally`s."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_TERMINATED = 128 + signal.SIGTERM


def run_interruptible(work: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> T:
    """Its result. `loop_factory`: makes the event loop, None for asyncio's own. Raises KeyboardInterrupt after Ctrl-C and SystemExit after
    SIGTERM, once the work has cleaned up."""
    terminated = False

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, terminate)
        try:
            return await work
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(run())
    except asyncio.CancelledError:
        if terminated:
            raise SystemExit(EXIT_TERMINATED) from None
        raise
