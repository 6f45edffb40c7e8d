"""The solver's process beside a planner: warm, killed in the middle of a job, too slow, talking nonsense, never there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from drawn_problems import question_by_hand
from qlm_planner.machine.effects import Solve, Stage
from qlm_planner.machine.events import Solved, SolveFailed
from qlm_planner.overload.advice import AdviceFailedError, advise
from qlm_planner.overload.advice_question import Question
from qlm_planner.search import Problem
from qlm_planner.search.problem import FIELDS
from qlm_planner.shell.solver_client import SolverWorker
from qlm_planner.shell.solver_requests import Choice
from running_cluster import gone

from .cluster import DEADLINE_S, Cluster, until

WARM_UP_S = 300.0
"""Compiled code may not be cached yet."""

HOURS_MOVES = 2_000_000_000


def problem(groups: int = 6) -> Problem:
    """Groups of two models by turns on one queue, the last one due first."""
    ones, zero = np.ones(groups), np.zeros(1)
    return Problem(
        model=np.arange(groups, dtype=np.int32) % 2,
        band=np.zeros(groups, dtype=np.int32),
        count=10.0 * ones,
        deadline_s=np.linspace(300.0, 20.0, groups),
        spread_s=0.0 * ones,
        slo_s=300.0 * ones,
        weight=ones,
        work_s=np.full((1, groups), 2.0),
        work_variance=np.full((1, groups), 0.1),
        own_s=np.full((1, groups), 1.0),
        own_variance=np.full((1, groups), 0.1),
        drain_s=np.full((1, groups), 1.0),
        cold_s=np.full((1, 2), 5.0),
        warm_s=np.full((1, 2), 1.0),
        kind=np.zeros(1, dtype=np.int32),
        active=np.zeros(1, dtype=np.int32),
        lead_s=zero,
        lead_variance=zero,
        drain_lead_s=zero,
        drain_lead_variance=zero,
        warm=np.zeros((1, 2), dtype=np.bool_),
        head=np.full(1, -1, dtype=np.int32),
        clear_cost=zero,
        leave_cost=zero,
    )


def job(number: int, *, moves: int = 100) -> Solve:
    return Solve(job=number, stage=Stage.REPLAN, problem=problem(), orders=None, moves=moves, seed=number)


@asynccontextmanager
async def worker(timeout_s: float = 60.0, command: tuple[str, ...] = (), choice: Choice = Choice.HEURISTIC) -> AsyncIterator[SolverWorker]:
    found = SolverWorker(choice, timeout_s, command=command)
    found.start()
    found.start()
    try:
        yield found
    finally:
        await found.stop()
        await found.stop()


async def warm(found: SolverWorker) -> None:
    async def is_ready() -> bool:
        return found.ready

    await until(is_ready, "the solver is warm", WARM_UP_S)


async def test_jobs_are_done_and_a_kill_in_the_middle_of_one_is_survived() -> None:
    answers: asyncio.Queue[Solved | SolveFailed] = asyncio.Queue()
    async with worker() as found:
        found.submit(job(1), answers.put_nowait)
        first = await asyncio.wait_for(answers.get(), WARM_UP_S)
        assert isinstance(first, Solved), first
        assert sorted(first.orders.groups.tolist()) == list(range(6))

        found.submit(job(2, moves=HOURS_MOVES), answers.put_nowait)
        found.submit(job(3), answers.put_nowait)
        found.submit(job(4), answers.put_nowait)
        pid = found.pid
        assert pid is not None
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        failed = [await asyncio.wait_for(answers.get(), DEADLINE_S)]
        while not answers.empty():
            failed.append(answers.get_nowait())
        assert all(isinstance(each, SolveFailed) for each in failed)
        assert 3 not in {each.job for each in failed}, "of those that wait only the newest is kept"

        await warm(found)
        assert found.pid != pid
        found.submit(job(5), answers.put_nowait)
        answered = await asyncio.wait_for(answers.get(), DEADLINE_S)
        while answered.job != 5:
            answered = await asyncio.wait_for(answers.get(), DEADLINE_S)
        assert isinstance(answered, Solved)


async def test_a_killed_solver_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyomo", reason="the extra planner is not installed")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    answers: asyncio.Queue[Solved | SolveFailed] = asyncio.Queue()
    async with worker(choice=Choice.EXACT_GLPK) as found:
        await warm(found)
        found.submit(replace(job(1), problem=problem(9)), answers.put_nowait)

        async def writes() -> bool:
            return bool(list(tmp_path.glob("*/*")))

        await until(writes, "the solver's files are there")
        pid = found.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert isinstance(await asyncio.wait_for(answers.get(), DEADLINE_S), SolveFailed)
        await warm(found)
        assert found.pid != pid
        assert len(list(tmp_path.iterdir())) == 1
        assert not list(tmp_path.glob("*/*"))
    assert not list(tmp_path.iterdir())


PLANNER = """
import asyncio, pickle, sys
from qlm_planner.shell.solver_client import SolverWorker
from qlm_planner.shell.solver_requests import Choice

async def main():
    worker = SolverWorker(Choice(sys.argv[1]), 600.0)
    worker.start()
    job = pickle.load(sys.stdin.buffer)

    def submit(*_):  # again and again: on a busy machine the program may not be built within its limit
        asyncio.get_running_loop().call_soon(worker.submit, job, submit)

    submit()
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("choice", "moves", "killed"),
    [(Choice.EXACT_GLPK, 100, "solver"), (Choice.HEURISTIC, HOURS_MOVES, "planner")],
)
async def test_no_solver_outlives_a_killed_planner(choice: Choice, moves: int, killed: str) -> None:
    if choice is Choice.EXACT_GLPK:
        pytest.importorskip("pyomo", reason="the extra planner is not installed")
    pipe = asyncio.subprocess.PIPE
    planner = await asyncio.create_subprocess_exec(sys.executable, "-c", PLANNER, choice, stdin=pipe, stdout=pipe)
    descendants: list[int] = []  # the solver's process, and glpsol's
    try:
        assert planner.stdin is not None
        assert planner.stdout is not None
        planner.stdin.write(pickle.dumps(replace(job(1, moves=moves), problem=problem(9))))
        planner.stdin.write_eof()
        assert b"solver_ready" in await asyncio.wait_for(planner.stdout.readline(), WARM_UP_S)

        async def solves() -> bool:
            descendants[:] = children(planner.pid)
            if choice is Choice.HEURISTIC:
                return runs(descendants[-1])
            descendants.extend(child for child in children(descendants[0]) if is_glpsol_with_a_problem(child))
            return len(descendants) == 2

        await until(solves, "the solver solves")
        os.kill(descendants[-1], signal.SIGSTOP)  # it cannot end by itself
        os.kill(planner.pid if killed == "planner" else descendants[0], signal.SIGKILL)

        async def are_gone() -> bool:
            return all(gone(pid) for pid in descendants)

        await until(are_gone, "all are gone")
    finally:
        with contextlib.suppress(ProcessLookupError):
            planner.kill()
        await planner.wait()
        for pid in descendants:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_glpsol_with_a_problem(pid: int) -> bool:
    command, *arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return command.endswith("glpsol") and "--cpxlp" in arguments


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


async def test_a_job_that_takes_too_long_is_ended() -> None:
    answers: asyncio.Queue[Solved | SolveFailed] = asyncio.Queue()
    async with worker(timeout_s=0.3) as found:
        await warm(found)
        pid = found.pid
        found.submit(job(1, moves=HOURS_MOVES), answers.put_nowait)
        answer = await asyncio.wait_for(answers.get(), DEADLINE_S)
        assert isinstance(answer, SolveFailed)
        assert "within 0.3 s" in answer.reason

        async def is_another() -> bool:
            return found.ready and found.pid != pid

        await until(is_another, "another process", WARM_UP_S)


def question(groups: int = 6, kinds: int = 1) -> Question:
    """One instance, a load that is far too much for it where there are many groups, and as many kinds that are tried."""
    one = problem(groups)
    on_kind = {name: np.repeat(getattr(one, name), kinds, axis=0) for name, (shape, _, _) in FIELDS.items() if shape[0] == "k"}
    on_queue = {name: np.repeat(getattr(one, name), kinds + 1, axis=0) for name, (shape, _, _) in FIELDS.items() if shape[0] == "q"}
    on_queue["kind"] = np.array([0, *range(kinds)], dtype=np.int32)
    many = replace(one, weights=one.weights, **on_kind, **on_queue)
    return question_by_hand(many, 1, gpus=("big",) * kinds, n_gpu=(1,) * kinds)


LONG = 4_000, 8
"""A question that takes seconds."""


async def test_advice_is_the_same_there_makes_room_for_jobs_and_leaves_the_solver_as_it_is() -> None:
    """Where it fails and where nobody waits for it, too."""
    answers: asyncio.Queue[Solved | SolveFailed] = asyncio.Queue()
    async with worker() as found:
        with pytest.raises(AdviceFailedError, match="not ready"):
            await found.advise(question())
        await warm(found)
        wanted = question(*LONG)
        advice = asyncio.create_task(found.advise(wanted))
        for number in range(3):
            await asyncio.sleep(0.05)
            found.submit(job(number), answers.put_nowait)
            assert isinstance(await asyncio.wait_for(answers.get(), DEADLINE_S), Solved)
            assert not advice.done(), "it takes seconds"
        assert await advice == advise(wanted)

        pid = found.pid
        with pytest.raises(AdviceFailedError, match="AttributeError"):
            await found.advise(cast(Question, "no question"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await found.advise(question(*LONG))
        small = question()
        assert await found.advise(small) == advise(small), "not the answer to the question before"
        found.submit(job(1), answers.put_nowait)
        assert isinstance(await asyncio.wait_for(answers.get(), DEADLINE_S), Solved)
        assert found.pid == pid


async def test_advice_that_takes_too_long_or_whose_process_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with worker() as found:
        await warm(found)
        monkeypatch.setattr("qlm_planner.shell.solver_client.ADVICE_TIMEOUT_S", 0.05)
        with pytest.raises(AdviceFailedError, match=r"within 0\.05 s"):
            await found.advise(question(*LONG))
        monkeypatch.undo()

        async def is_another() -> bool:
            return found.restarts == 1 and found.ready

        await until(is_another, "another process", WARM_UP_S)
        advice = asyncio.create_task(found.advise(question(*LONG)))
        await asyncio.sleep(0.05)
        assert found.pid is not None
        os.kill(found.pid, signal.SIGKILL)
        with pytest.raises(AdviceFailedError, match="died"):
            await advice


NONSENSE = """
import pickle, struct, sys
def read(size): return sys.stdin.buffer.read(size)
def message(): return read(struct.unpack("!Q", read(8))[0])
def write(size, body): sys.stdout.buffer.write(struct.pack("!Q", size) + body); sys.stdout.flush()
message()
warm = pickle.dumps(0.0)
write(len(warm), warm)
message()
write({size}, b"nonsense")
message()
"""


@pytest.mark.parametrize(("size", "reason"), [(8, "unreadable"), (1 << 40, "bytes")])
async def test_an_answer_that_is_none_ends_the_process(size: int, reason: str) -> None:
    answers: asyncio.Queue[Solved | SolveFailed] = asyncio.Queue()
    async with worker(command=(sys.executable, "-c", NONSENSE.format(size=size))) as found:
        for number in (1, 2):
            await warm(found)
            found.submit(job(number), answers.put_nowait)
            answer = await asyncio.wait_for(answers.get(), DEADLINE_S)
            assert isinstance(answer, SolveFailed)
            assert reason in answer.reason

            async def is_over(number: int = number) -> bool:
                return found.restarts == number

            await until(is_over, "the process is ended")


async def test_a_solver_that_never_starts_says_so() -> None:
    answers: asyncio.Queue[Solved | SolveFailed] = asyncio.Queue()
    async with worker(command=(sys.executable, "-c", "raise SystemExit(3)")) as found:
        found.submit(job(1), answers.put_nowait)
        assert isinstance(await asyncio.wait_for(answers.get(), DEADLINE_S), SolveFailed)
        found.submit(job(2), answers.put_nowait)
        assert isinstance(await asyncio.wait_for(answers.get(), DEADLINE_S), SolveFailed)


async def test_a_planner_continues_without_its_solver(cluster: Cluster) -> None:
    """Killed again and again while requests arrive: all are placed, and the planner tries again when there is one."""
    await cluster.join("a")
    async with cluster.planner() as shell:

        async def is_ready() -> bool:
            return shell.solver.ready and shell.term is not None and shell.term.caught_up.is_set()

        await until(is_ready, "it leads, with a solver", WARM_UP_S)
        pid = shell.solver.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for number in range(6):
            await cluster.submit(("mistral-7b", "vicuna-13b")[number % 2], slo_s=20.0 + 40.0 * number, count=5)
        await until(cluster.all_placed, "placed without a solver")
        await until(is_ready, "another solver", WARM_UP_S)
        assert shell.solver.pid != pid
        assert cluster.metrics.registry.get_sample_value("qlm_planner_solver_up") == 1.0

        async def has_solved() -> bool:
            await cluster.submit("mistral-7b-code", slo_s=1000.0)
            spans = [dict(span.attributes or {}) for span in cluster.spans.get_finished_spans() if span.name == "planner.solve"]
            return any(span["qlm.solve.outcome"] in ("applied", "kept") for span in spans)

        await until(has_solved, "a job is done", 60.0)
