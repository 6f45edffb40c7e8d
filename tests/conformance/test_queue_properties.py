"""Any history of calls keeps the design's invariants 1 to 4, and leads both implementations to the same state."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from .conftest import Servers
from .property_machine import QueueMachine
from .property_world import BOUNDS
from .subjects import MemorySubject, RedisSubject, Subject

STEPS = 40
EXAMPLES = {"memory": 80, "valkey mirrored": 20}


@pytest.mark.parametrize("how", list(EXAMPLES))
def test_any_history_keeps_the_invariants(how: str, servers: Servers) -> None:
    names = itertools.count(1)

    def make_subject() -> Subject:
        if how == "memory":
            return MemorySubject("properties", BOUNDS)
        return RedisSubject(servers.url("valkey"), f"properties-{how}-{next(names)}", BOUNDS)

    run_state_machine_as_test(
        partial(QueueMachine, make_subject, mirrored="mirrored" in how),  # type: ignore[arg-type]
        settings=settings(
            max_examples=EXAMPLES[how],
            stateful_step_count=STEPS,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
