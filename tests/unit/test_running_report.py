"""What an agent tells the queue of its runs, and how it is read."""

from __future__ import annotations

import math

import pytest

from qlm.api.v1 import instance_pb2
from qlm_agent.decisions.runs import Run, RunPhase, RunTable
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.delivery.requests import read_pulled
from qlm_agent.shell.running_report import running_report
from qlm_core.instance import InstanceFacts
from qlm_core.preemption import Urgency
from qlm_core.reported_runs import GroupRuns, RunsTold
from qlm_core.request import RequestKey
from qlm_process.wire import instance as instance_wire
from qlm_process.wire.running import RUNS_MAX, from_body, to_body
from qlm_queue.values import Pulled

FACTS = InstanceFacts(name="a", incarnation="a/1", gpu="A10", n_gpu=1, engine="simulated", models=("m",), active_model="m")
TOLD = RunsTold(
    at_s=1_000.0,
    token_s=0.02,
    groups={
        "1-1": GroupRuns(output_tokens=(5, 0, 300), prompt_tokens=90, prefill_left_tokens=30),
        "1-2": GroupRuns(output_tokens=(7,), prompt_tokens=10, offloaded_tokens=17),
    },
)


def run(number: int, *, produced: int, started: bool = True) -> Run:
    return Run(
        run_id=f"{number}-0/1",
        queue_id=f"{number}-0",
        model="m",
        prompt_tokens=10 * number,
        output_tokens_max=1_000,
        resumed=0,
        produced=produced,
        stored=0,
        urgency=Urgency(band=0, deadline_s=math.inf),
        started=started,
    )


def held(number: int, group_id: str) -> HeldRun:
    pulled = Pulled(
        queue_id=f"{number}-0",
        key=RequestKey("t", str(number)),
        group_id=group_id,
        acceptance_number=number,
        accepted_s=1.0,
        attempt=1,
        failed_attempts=0,
        gateway="g",
        body=b"",
        progress=b"",
    )
    return read_pulled(pulled, text_output=False, pulled_s=2.0, engine_clock_s=0.0)


def test_runs_are_told_by_group() -> None:
    runs, of = RunTable(), {}
    for number, (group_id, produced, started) in enumerate([("x", 40, True), ("x", 0, False), ("y", 9, True), ("y", 5, True)], start=1):
        each = run(number, produced=produced, started=started)
        runs.add(each)
        of[each.run_id] = held(number, group_id)
    away, ended = runs.all()[2:]
    runs.move(away, RunPhase.OFFLOADED)
    runs.move(ended, RunPhase.ENDED)
    told = running_report(runs, of, now_s=5.0, token_s=0.5)
    assert told is not None
    assert (told.at_s, told.token_s) == (5.0, 0.5)
    assert told.groups == {
        "x": GroupRuns(output_tokens=(40, 0), prompt_tokens=30, prefill_left_tokens=20),
        "y": GroupRuns(output_tokens=(9,), prompt_tokens=30, offloaded_tokens=39),
    }
    for number in range(10, 10 + RUNS_MAX):
        runs.add(run(number, produced=1))
    assert running_report(runs, of, now_s=5.0, token_s=0.5) is None


def test_what_is_told_is_read() -> None:
    body = to_body(FACTS, TOLD)
    assert from_body(body) == TOLD
    assert instance_wire.from_body(body) == FACTS
    assert from_body(to_body(FACTS)) is None
    assert TOLD.made_since(1_000.1) == 5
    assert TOLD.made_since(900.0) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"token_s": 0.0},
        {"token_s": math.nan},
        {"token_s": -1.0},
        {"token_s": 5e-324},
        {"running_told_s": math.inf},
        {"running": [instance_pb2.RunningGroup(group_id="g", output_tokens=[1] * (RUNS_MAX + 1))]},
    ],
)
def test_what_makes_no_sense_is_not_taken(fields: dict[str, object]) -> None:
    message = instance_pb2.Instance.FromString(to_body(FACTS, TOLD))
    for name, value in fields.items():
        if isinstance(value, list):
            message.running.extend(value)
        else:
            setattr(message, name, value)
    assert from_body(message.SerializeToString()) is None
    assert from_body(b"\xff\xff") is None
