"""A policy of a test, consulted by an engine in another process: the object stays here, and can be inspected.

The engine is given `ServedPolicy`, by name and with the address of a socket, as a user gives it a policy of his own. Each call travels
over the socket and is answered by the test's policy, in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from qlm_agent.engines.policies.port import EnginePolicy, Sequences, SequenceView


def served_policy(policy: EnginePolicy) -> dict[str, Any]:
    """Policy of a VllmModel by which its engine consults this policy."""
    listener = Listener(family="AF_UNIX")
    threading.Thread(target=_accept, args=(listener, policy), name="served-policy", daemon=True).start()
    return {"policy": f"{ServedPolicy.__module__}:{ServedPolicy.__name__}", "policy_options": {"address": listener.address}}


class ServedPolicy(EnginePolicy):
    """See `qlm_agent.engines.policies.port.EnginePolicy`."""

    def __init__(self, address: str) -> None:
        self._connection = Client(address, family="AF_UNIX")

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        found: list[str] = self._call("order", now_s, waiting, running)
        return found

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        found: list[str] = self._call("victims", now_s, running)
        return found

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        found: list[str] = self._call("preempt", now_s, waiting, running)
        return found

    def next_wakeup_s(self, now_s: float) -> float | None:
        at_s: float | None = self._call("next_wakeup_s", now_s)
        return at_s

    def _call(self, question: str, now_s: float, *views: Sequence[SequenceView]) -> Any:
        self._connection.send((question, now_s, [[asdict(view) for view in each] for each in views]))
        return self._connection.recv()


def _accept(listener: Listener, policy: EnginePolicy) -> None:
    while True:
        _answer(listener.accept(), policy)


def _answer(connection: Connection, policy: EnginePolicy) -> None:
    """Until the engine is gone."""
    while True:
        try:
            question, now_s, views = connection.recv()
        except (EOFError, OSError):
            return
        found = getattr(policy, question)(now_s, *(Sequences([SequenceView(**view) for view in each]) for each in views))
        connection.send(list(found) if isinstance(found, Sequence) else found)
