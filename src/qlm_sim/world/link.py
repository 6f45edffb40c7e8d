"""The queue's port as one process has it: every operation is a call over the network."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import Lease
from qlm_sim.world.network import Command, Network
from qlm_sim.world.process import Process


class QueueLink:
    """See `qlm_queue.port.Queue`. An operation is the twin's, which the server has: its command holds all arguments by position."""

    def __init__(self, name: str, process: Process, network: Network) -> None:
        self.name = name
        self._process = process
        self._network = network

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

    async def renew_lease(self, lease: Lease, ttl_s: float, within_s: float | None = None) -> None:
        await self._network.call(self._process, Command(name="renew_lease", args=(lease, ttl_s)), within_s)

    def __getattr__(self, operation: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        _, *parameters = inspect.signature(getattr(MemoryQueue, operation)).parameters.values()
        defaults = {each.name: each.default for each in parameters}
        names = tuple(defaults)

        async def call(*args: Any, **named: Any) -> Any:
            if len(args) < len(names):
                given = defaults | named
                args = (*args, *(given[name] for name in names[len(args) :]))
            return await self._network.call(self._process, Command(name=operation, args=args))

        setattr(self, operation, call)  # the next use finds it
        return call
