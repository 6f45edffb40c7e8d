"""Faults planted in the scripts, each of which the property test must find: by its invariants alone, without the memory twin.

A property test that finds nothing proves nothing. These are the mistakes that such scripts are likely to have.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyFailure, FlakyStrategyDefinition
from hypothesis.stateful import run_state_machine_as_test

from qlm_queue.redis.scripts import library_source

from .conftest import Servers
from .property_machine import QueueMachine
from .property_world import BOUNDS
from .subjects import RedisSubject, Subject

EXAMPLES_MAX = 400
STEPS = 40
ATTEMPTS = 3


@dataclass(frozen=True)
class Fault:
    """`right` is in the scripts once; `wrong` takes its place."""

    name: str
    right: str
    wrong: str


FAULTS = (
    Fault(
        "pull does not check the lease",
        "if not lease_holds(prefix, incarnation, token) or redis.call('HGET', prefix .. ':registered', instance) ~= incarnation then\n"
        "    return LEASE_LOST\n  end\n  local list",
        "if redis.call('HGET', prefix .. ':registered', instance) ~= incarnation then\n    return LEASE_LOST\n  end\n  local list",
    ),
    Fault(
        "place does not open a drained group again",
        "if (place_of(prefix, group.gid) or '') == '' then",
        "if not place_of(prefix, group.gid) then",
    ),
    Fault(
        "requeue puts a request behind those that came later",
        "record.owner = owner  -- events",
        "record.owner, record.number = owner, record.number + 1000  -- events",
    ),
    Fault("cancel leaves the counters", "count_request(batch, record, -1)", "if state ~= 'X' then count_request(batch, record, -1) end"),
    Fault("emit does not count its bytes", "offset + #output - stored + #logprobs)", "0)"),
    Fault("the end forgets the bytes of output", "(record.stored_output or #progress)", "0"),
    Fault(
        "emit appends again what is partly stored",
        "redis.call('APPEND', key, string.sub(output, stored - offset + 1))",
        "redis.call('APPEND', key, output)",
    ),
    Fault(
        "apply_plan does not compare the versions",
        "if versions[index] ~= wanted[index] then applies = false end",
        "if versions[index] == -1 then applies = false end",
    ),
    Fault(
        "apply_plan leaves a group on the queue that it came from",
        "for _, gid in ipairs(gids) do redis.call('LREM', list, 1, gid) end",
        "for index = 2, #gids do redis.call('LREM', list, 1, gids[index]) end",
    ),
    Fault(
        "the head is as urgent as its last request",
        "read_entry(prefix, redis.call('ZRANGE', members, 0, 0)[1])",
        "read_entry(prefix, redis.call('ZRANGE', members, -1, -1)[1])",
    ),
    Fault(
        "a returned request stays in the running set of its agent",
        "leave_running(batch, record)\n  local owner",
        "count(batch, 'running', -1)\n  local owner",
    ),
)


def _run(url: str, library: str, label: str) -> None:
    names = itertools.count(1)

    def make_subject() -> Subject:
        return RedisSubject(url, f"{label}-{next(names)}", BOUNDS, library=library)

    run_state_machine_as_test(
        partial(QueueMachine, make_subject, mirrored=False),  # type: ignore[arg-type]
        settings=settings(
            max_examples=EXAMPLES_MAX,
            stateful_step_count=STEPS,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
        ),
    )


def _tried(url: str, library: str, label: str) -> None:
    """Runs it again if the server's clock advanced otherwise in the middle, which says nothing of the fault."""
    for _ in range(ATTEMPTS):
        with suppress(FlakyStrategyDefinition):
            _run(url, library, label)
            return


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_the_property_test_finds(fault: Fault, servers: Servers) -> None:
    source = library_source()
    assert source.count(fault.right) == 1, "the scripts have changed: plant this fault anew"
    library = source.replace(fault.right, fault.wrong)
    with pytest.raises((AssertionError, ValueError, FlakyFailure)) as found:  # a broken invariant, or a state that cannot be dumped
        _tried(servers.url("valkey"), library, fault.name)
    if isinstance(found.value, FlakyFailure):  # the server's clock advanced otherwise when the finding was tried again
        assert found.group_contains((AssertionError, ValueError))
