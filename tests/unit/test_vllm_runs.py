"""The runs of an engine process, where each of them ends, and the life of the process, with a scripted vLLM."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from counting_runner import CountingRunner, record_of
from qlm_agent.engines.port import EngineRequest, FailureKind, FinishReason, TokenPrompt
from qlm_agent.engines.vllm.engine_runs import EngineRuns
from qlm_agent.engines.vllm.process.child import CallFailed, Child, ChildEnded
from qlm_agent.engines.vllm.process.frames import Frame
from qlm_agent.engines.vllm.process.loop import ChildLoop
from qlm_agent.engines.vllm.runner.port import LoadPlan, RunOutput, RunPlan, VllmProcessEnded, bytes_of, ids_of
from qlm_agent.engines.vllm.runner.runs import Runs

DEADLINE_S = 30.0
PLAN = LoadPlan(weights="", engine={}, context_tokens=100, kv_bytes_per_token=1)


def plan(*, prompt: int = 10, produced: Sequence[int] = (), most: int = 20, **sampling: object) -> RunPlan:
    return RunPlan(run_id="r", prompt=[1] * prompt, produced=list(produced), output_tokens_max=most, sampling=dict(sampling), policy={})


@pytest.fixture
def runs() -> Runs:
    return Runs(CountingRunner(), context_tokens=100)


def output_of(runs: Runs) -> tuple[list[int], RunOutput]:
    """All tokens of the one run, and its last output."""
    tokens: list[int] = []
    while True:
        for made in runs.step():
            tokens += made.tokens
            if made.finish or made.failure:
                return tokens, made


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (plan(prompt=0), FailureKind.REFUSED),
        (plan(prompt=100), FailureKind.REFUSED),
        (plan(regex="("), FailureKind.REFUSED),
        (plan(prompt=60), FailureKind.KV_CAPACITY),
    ],
)
def test_an_unservable_run_says_why(runs: Runs, refused: RunPlan, kind: FailureKind) -> None:
    made = runs.add(1.0, refused)
    assert made is not None
    assert made.failure == kind.value
    assert made.message


@pytest.mark.parametrize(
    ("whole", "finish"),
    [
        (plan(produced=[5] * 20), "length"),
        (plan(produced=[5, 2]), "stop"),
        (plan(prompt=50, produced=[5] * 50, most=1000), "length"),
    ],
)
def test_a_run_that_was_over_ends_at_once(runs: Runs, whole: RunPlan, finish: str) -> None:
    made = runs.add(1.0, whole)
    assert made is not None
    assert (made.finish, made.tokens) == (finish, [])


def test_an_eos_that_is_ignored_ends_nothing(runs: Runs) -> None:
    assert runs.add(1.0, plan(produced=[5, 2], most=4, ignore_eos=True)) is None
    assert output_of(runs)[0] == [102, 103]


def test_a_run_that_outgrows_kv_fails_and_its_output_is_reported(runs: Runs) -> None:
    assert runs.add(1.0, plan(most=80)) is None
    tokens, last = output_of(runs)
    assert (len(tokens), last.failure, last.finish) == (50, FailureKind.KV_CAPACITY.value, "")


def test_a_stop_string_ends_a_run_in_the_runner_too(runs: Runs) -> None:
    assert runs.add(1.0, plan(stop=["fg"])) is None  # chr(102) + chr(103)
    tokens, last = output_of(runs)
    assert (tokens, last.finish) == ([100, 101], "stop")
    assert not runs.runner.busy
    assert not runs.knows("r")


def test_held_tokens_are_reported_where_the_run_ends_otherwise(runs: Runs) -> None:
    assert runs.add(1.0, plan(most=3, stop=["fgh"])) is None
    tokens, last = output_of(runs)
    assert (tokens, last.finish) == ([100, 101, 102], "length")


class BreakingRunner(CountingRunner):
    """vLLM ends the run with an error after its fourth token."""

    def step(self) -> list[RunOutput]:
        made = super().step()
        for each in made:
            if each.tokens == [103]:
                self.abort([each.run_id])
                each.failure = FailureKind.BROKEN.value
        return made


def test_held_tokens_are_left_to_the_next_attempt_where_the_engine_broke() -> None:
    """It would not find the stop string that begins in them."""
    broken = Runs(BreakingRunner(), context_tokens=100)
    assert broken.add(1.0, plan(stop=["ghi"])) is None
    tokens, last = output_of(broken)
    assert (tokens, last.failure) == ([100, 101, 102], FailureKind.BROKEN.value)
    again = Runs(CountingRunner(), context_tokens=100)
    assert again.add(1.0, plan(stop=["ghi"], produced=tokens)) is None
    assert output_of(again)[0] == [], "the stop string is found over the seam"


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize(("stop", "expected"), [(["fg"], [100, 101]), (["klm"], [100, 101, 102, 103, 104, 105]), ([], range(100, 106))])
def test_log_probabilities_are_reported_with_their_tokens(runs: Runs, top: int, stop: list[str], expected: Sequence[int]) -> None:
    """Also where tokens are held back, or left out with a stop string."""
    assert runs.add(1.0, plan(most=6, logprobs=top, stop=stop)) is None
    records: dict[int, bytes] = {}
    while runs.runner.busy:
        for made in runs.step():
            size = len(record_of(0, top))
            records |= {token: made.logprobs[at * size : (at + 1) * size] for at, token in enumerate(made.tokens)}
            assert len(made.logprobs) == size * len(made.tokens)
    assert records == {token: record_of(token, top) for token in expected}


class Process:
    """An engine process in a thread of this one, and the agent's end of it."""

    def __init__(self, runner: CountingRunner, step_timeout_s: float = DEADLINE_S) -> None:
        self.steps: list[Frame] = []
        self.ends: list[str] = []
        self.runner = runner
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs = theirs
        theirs.sendall(Frame({"t": "hello", "pid": 0}).encoded())  # 0: nothing that a kill could hit
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.child = Child(
            step_timeout_s=step_timeout_s,
            on_step=lambda child, frame: self.steps.append(frame),
            on_end=lambda child, why: self.ends.append(why),
            exit_code=lambda pid: asyncio.get_running_loop().create_future(),
        )

    def _run(self) -> None:
        with self._theirs:
            try:
                ChildLoop(self._theirs, lambda plan: self.runner).run()
            except (OSError, VllmProcessEnded):
                return

    async def start(self) -> None:
        self._thread.start()
        await asyncio.get_running_loop().create_connection(lambda: self.child, sock=self._ours)
        await self.child.ready(DEADLINE_S)
        await self.child.call("load", plan={"weights": "", "engine": {}, "context_tokens": 100, "kv_bytes_per_token": 1})

    async def stop(self) -> None:
        await self.child.stop()
        await asyncio.to_thread(self._thread.join, DEADLINE_S)

    def add(self, run_id: str, tokens: int, *, prompt: str | None = None, **head: object) -> None:
        given: dict[str, object] = {"prompt": 10} if prompt is None else {"prompt": 0, "text": prompt}
        frame = {"op": "add", "run": run_id, "max": tokens, "sampling": {}, "policy": {}, **given, **head}
        self.child.send(Frame(frame, bytes_of([1] * 10) if prompt is None else b""))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    process = Process(CountingRunner())
    await process.start()
    yield process
    await process.stop()


def request(run_id: str) -> EngineRequest:
    return EngineRequest(run_id=run_id, model="m", prompt=TokenPrompt(ids=[1]), prompt_tokens=1, output_tokens_max=5)


async def test_output_comes_in_order_with_its_times(process: Process) -> None:
    held = EngineRuns()
    held.add(request("r"), sent=True)
    process.add("r", 5)
    process.add("text", 2, prompt="hey")
    await process.until(lambda: sum(len(row) > 6 for frame in process.steps for row in frame.head["made"]) == 2)
    for frame in process.steps:
        held.take(frame)
    (output,) = held.read()  # of the run that it knows
    assert (ids_of(output.token_ids), output.finish) == ([100, 101, 102, 103, 104], FinishReason.LENGTH)
    assert (output.started_s, output.last_s) == (1.0, 2.0)
    assert held.read() == []


async def test_log_probabilities_come_with_the_tokens_of_their_run(process: Process) -> None:
    """Over frames that have some runs with them, some without, and some that nobody knows any more."""
    held = EngineRuns()
    for run_id in ("plain", "asks", "asks-more"):
        held.add(request(run_id), sent=True)
    await process.child.call("pause")
    for run_id, sampling in (("gone", {"logprobs": 1}), ("plain", {}), ("asks", {"logprobs": 0}), ("asks-more", {"logprobs": 3})):
        process.add(run_id, 5, sampling=sampling)
    await process.child.call("resume")
    await process.until(lambda: sum(len(row) > 6 for frame in process.steps for row in frame.head["made"]) == 4)
    for frame in process.steps:
        held.take(frame)
    found = {output.run_id: output.logprobs for output in held.read()}
    reported_tokens = range(100, 105)
    assert found == {
        "plain": b"",
        "asks": b"".join(record_of(token, 0) for token in reported_tokens),
        "asks-more": b"".join(record_of(token, 3) for token in reported_tokens),
    }


async def test_an_aborted_run_is_forgotten(process: Process) -> None:
    await process.child.call("pause")
    process.add("r", 5)
    await process.child.call("abort", runs=["r", "unknown"])
    assert not process.runner.busy
    await process.child.call("resume")
    assert process.steps == []


async def test_an_offload_answers_with_who_is_away(process: Process) -> None:
    process.add("r", 40)
    answer = await process.child.call("offload", runs=["r"])
    assert answer["runs"] == ["r"]


async def test_an_offload_waits_for_who_is_on_the_way_and_not_for_who_lost_its_kv(process: Process) -> None:
    process.runner.leaves_late = True
    process.runner.stopped = {"leaves", "loses its KV"}  # they do not end before the call comes
    for run_id in ("leaves", "loses its KV"):
        process.add(run_id, 40)
    answer = asyncio.create_task(process.child.call("offload", runs=["leaves", "loses its KV"]))
    await process.until(lambda: len(process.runner.on_the_way) == 2)
    process.runner.on_the_way.discard("loses its KV")
    await process.child.call("ping")
    assert not answer.done()
    process.runner.away.add("leaves")
    process.runner.on_the_way.discard("leaves")
    async with asyncio.timeout(DEADLINE_S):
        assert (await answer)["runs"] == ["leaves"]


async def test_a_failed_call_says_why_and_the_process_goes_on(process: Process) -> None:
    with pytest.raises(CallFailed, match="RuntimeError: no such weights"):
        await process.child.call("reload", weights="x")
    with pytest.raises(CallFailed, match="unknown operation"):
        await process.child.call("dance")
    process.child.send(Frame({"op": "add", "run": "c", "chat": {"messages": []}, "prompt": 0, "max": 5, "sampling": {}, "policy": {}}))
    await process.until(lambda: bool(process.steps))
    assert process.steps[0].head["made"][0][6:] == ["", "refused", "the prompt: no template"]
    await process.child.call("ping")


@pytest.mark.parametrize("idle", [True, False])
async def test_a_process_ends_when_its_engine_is_gone(process: Process, idle: bool) -> None:
    if not idle:
        process.add("r", 40)
        await process.until(lambda: bool(process.steps))
    process.runner.gone = True
    await process.until(lambda: bool(process.ends))


async def test_a_process_that_makes_no_step_is_given_up() -> None:
    release = threading.Event()
    process = Process(CountingRunner(hangs=release), step_timeout_s=0.2)
    await process.start()
    process.add("r", 5)
    process.child.expect_steps(True)
    try:
        await process.until(lambda: bool(process.ends))
        assert "made no step for 0.2 s" in process.ends[0]
        with pytest.raises(ChildEnded, match="made no step"):
            await process.child.call("ping")
    finally:
        release.set()
        await process.stop()


async def test_a_call_without_an_answer_is_given_up() -> None:
    release = threading.Event()
    process = Process(CountingRunner(hangs=release), step_timeout_s=0.2)
    await process.start()
    process.add("r", 5)
    await process.until(lambda: process.runner.hung)
    try:
        with pytest.raises(ChildEnded, match="did not answer to ping"):
            await process.child.call("ping")
    finally:
        release.set()
        await process.stop()


async def test_a_call_to_a_process_that_wakes_waits_as_long_as_the_wake_may_take() -> None:
    """A client gives up a run in host memory while its model is on the way back, which takes longer than a step may."""
    wakes = threading.Event()
    process = Process(CountingRunner(wakes=wakes), step_timeout_s=0.1)
    await process.start()
    try:
        woken = asyncio.create_task(process.child.call("wake", timeout_s=DEADLINE_S, level=1))
        await process.until(lambda: process.runner.hung)
        aborted = asyncio.create_task(process.child.call("abort", runs=["r"]))
        await asyncio.wait([aborted], timeout=0.5)
        wakes.set()
        await woken
        await aborted
        assert not process.ends
    finally:
        wakes.set()
        await process.stop()


async def test_a_run_may_have_several_rows_in_a_frame() -> None:
    held = EngineRuns()
    held.add(request("r"), sent=True)
    rows = [["r", 2, 1.0, 1.5, 1.5, 32], ["gone", 1, 1.0, 1.5, 1.5, None], ["r", 1, 1.0, 2.0, 2.0, 32]]
    records = [record_of(token, 1) for token in (7, 8, 99, 9)]
    sizes = [len(records[0]) * 2, len(records[0]), len(records[0])]
    held.take(Frame({"made": rows, "logprobs": sizes}, bytes_of([7, 8, 99, 9]) + b"".join(records)))
    (output,) = held.read()
    assert (ids_of(output.token_ids), output.logprobs) == ([7, 8, 9], b"".join(records[:2] + records[3:]))
    assert output.cached_tokens == 32


async def test_runs_of_another_engine_fail_only_once() -> None:
    held = EngineRuns()
    held.add(request("r"), sent=True)
    held.fail("r", FailureKind.BROKEN, "gone")
    held.drop(["r"])
    assert held.read() == []
    held.add(request("s"), sent=True)
    held.take(Frame({"made": [["s", 1, 1.0, 1.5, 1.5, None]]}, bytes_of([7])))
    held.fail("s", FailureKind.BROKEN, "gone")
    (output,) = held.read()
    assert (ids_of(output.token_ids), output.started_s) == ([7], 1.0)
    assert output.failure is not None
