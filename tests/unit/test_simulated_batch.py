"""Continuous batching of the simulated engine, step by step; a step takes one second here."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from qlm_agent.engines.policies.port import SequenceView
from qlm_agent.engines.policies.registry import FirstComeFirstServed, engine_policy
from qlm_agent.engines.policies.urgency import UrgencyFirst
from qlm_agent.engines.port import FailureKind
from qlm_agent.engines.simulated.batching.kv_blocks import BLOCK_TOKENS, KvBlocks, blocks_for
from qlm_agent.engines.simulated.batching.sequences import RunState
from simulated_steps import Steps, make, run, spans_of


def test_a_run_step_by_step() -> None:
    steps = Steps()
    batch = make(steps)
    batch.add(0.0, run("1", 30, 3))
    batch.advance(0.9)
    assert batch.progress() == []
    batch.advance(1.0)
    assert spans_of(batch.news()) == ["1[0:1]"]  # the prefill gives the first token
    assert batch.kv.used == 2
    batch.advance(2.5)
    assert batch.news() == []
    assert spans_of(batch.progress()) == ["1[1:2]"]
    batch.advance(3.0)
    assert spans_of(batch.news()) == ["1[2:3]."]
    assert steps.calls == [(0, 0, [(0, 30)]), (1, 31, []), (1, 32, [])]
    assert (batch.kv.used, batch.running, batch.next_due_s) == (0, 0, None)


def test_times_are_those_of_the_steps() -> None:
    batch = make()
    batch.add(5.0, run("1", 30, 3))
    batch.advance(100.0)
    (ended,) = batch.progress()
    assert (ended.started_s, ended.first_s, ended.last_s) == (5.0, 6.0, 8.0)


def test_prefill_in_chunks_beside_decoding() -> None:
    steps = Steps()
    batch = make(steps, chunk=100)
    batch.add(0.0, run("1", 50, 10))
    batch.advance(1.0)
    batch.add(1.0, run("2", 250, 5))
    batch.advance(4.0)
    chunks = [step[2] for step in steps.calls]
    assert chunks[:4] == [[(0, 50)], [], [(0, 100)], [(100, 100)]]  # the step that was under way at 1.0 goes on without it
    batch.advance(5.0)
    assert "2[0:1]" in spans_of(batch.progress())


def test_kv_shortage_preempts_the_latest_and_recomputes_it() -> None:
    steps = Steps()
    batch = make(steps, kv=4 * BLOCK_TOKENS)
    batch.add(0.0, run("1", 31, 30))
    batch.add(0.0, run("2", 31, 30))
    batch.advance(1.0)
    assert batch.kv.free == 0
    batch.advance(3.0)  # step 2 fills the blocks, step 3 needs two more
    assert (batch.preemptions, batch.running, batch.waiting) == (1, 1, 1)
    assert spans_of(batch.progress()) == ["1[0:3]", "2[0:2]"]
    batch.advance(200.0)
    ends = {each.run_id: each for each in batch.progress()}
    assert ends["1"].done
    assert ends["2"].done
    assert (ends["2"].start, ends["2"].end) == (2, 30)
    recomputed = [step for step in steps.calls if step[2] and step[2][0][1] > 31]
    assert recomputed  # the prompt and what had been produced
    assert batch.kv.used == 0


def test_a_run_alone_that_outgrows_kv_fails() -> None:
    batch = make(kv=3 * BLOCK_TOKENS)
    batch.add(0.0, run("1", 40, 100))
    batch.advance(50.0)
    (ended,) = batch.progress()
    assert ended.done
    assert ended.failure is not None
    assert ended.failure.kind is FailureKind.KV_CAPACITY
    assert ended.end == 9  # 48 tokens of KV: the prompt and eight outputs; the ninth was made from them
    assert (batch.kv.used, batch.running, batch.waiting) == (0, 0, 0)


def test_a_prompt_beyond_kv_fails_at_once() -> None:
    batch = make(kv=3 * BLOCK_TOKENS)
    batch.add(0.0, run("1", 49, 100))
    (ended,) = batch.news()
    assert ended.failure is not None
    assert batch.next_due_s is None


def test_abort_at_any_moment_gives_everything_back() -> None:
    for at_s in (0.0, 0.5, 1.0, 1.5, 16.5, 17.0):
        batch = make()
        batch.add(0.0, run("1", 16, 100))
        batch.add(0.0, run("2", 20, 30))
        batch.advance(at_s)
        batch.abort("1")
        assert all(not line.startswith("1") for line in spans_of(batch.progress()))
        batch.advance(100.0)
        assert batch.progress()[-1].run_id == "2"
        assert (batch.kv.used, batch.running) == (0, 0), at_s


def test_resumed_runs_prefill_what_they_had_and_go_on() -> None:
    steps = Steps()
    batch = make(steps)
    batch.add(0.0, run("1", 30, 12, resumed=10))
    batch.advance(10.0)
    assert spans_of(batch.progress()) == ["1[10:12]."]
    assert steps.calls == [(0, 0, [(0, 40)]), (1, 41, [])]


def test_time_that_it_stood_still_does_not_count() -> None:
    batch = make()
    batch.add(0.0, run("1", 10, 3))
    batch.advance(1.5)
    batch.skip_time(1.5, 11.5)
    batch.advance(11.9)
    assert spans_of(batch.progress()) == ["1[0:1]"]
    batch.advance(12.0)
    assert spans_of(batch.progress()) == ["1[1:2]"]


class Urgent(FirstComeFirstServed):
    """The later the more urgent, and running runs make place: what a policy may do."""

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return [view.run_id for view in sorted(waiting, key=lambda view: -view.arrival)]

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        newest = max(view.arrival for view in waiting)
        return [view.run_id for view in running if view.arrival < newest][:1]


def test_a_policy_may_preempt_for_an_urgent_run_in_the_same_step() -> None:
    batch = make(batch_max=1, policy=Urgent())
    batch.add(0.0, run("1", 10, 50))
    batch.advance(3.0)
    batch.add(3.0, run("2", 10, 2))
    batch.advance(5.0)  # the step under way, then its prefill
    assert "2[0:1]" in spans_of(batch.progress())
    batch.advance(100.0)
    assert spans_of(batch.progress())[-1].endswith("50].")


class Willing(Urgent):
    """All running runs make place, the latest first."""

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return [view.run_id for view in sorted(running, key=lambda view: -view.arrival) if view.arrival < waiting[0].arrival]


def test_as_many_are_preempted_as_make_room() -> None:
    batch = make(kv=320, policy=Willing())  # 20 blocks
    for name in "123":
        batch.add(0.0, run(name, 60, 50))  # 4 blocks each, soon 5
    batch.advance(3.0)
    batch.add(3.0, run("4", 150, 2))  # 10 blocks
    batch.advance(5.0)
    assert (batch.preemptions, batch.running) == (1, 3)
    assert "4[0:1]" in spans_of(batch.progress())


def test_a_policy_sees_how_often_a_run_was_preempted() -> None:
    batch = make(batch_max=1, policy=UrgencyFirst(preemptions_max=2))
    batch.add(0.0, run("9", 10, 40, priority=1))
    for number in range(4):
        batch.advance(4.0 * number + 3.0)
        batch.add(4.0 * number + 3.0, run(str(number), 10, 2))
    batch.advance(200.0)
    assert batch.preemptions == 2
    assert not batch.running + batch.waiting


def test_nobody_is_preempted_where_that_does_not_make_room() -> None:
    batch = make(kv=320, policy=Urgent())  # names one
    for name in "123":
        batch.add(0.0, run(name, 60, 50))
    batch.advance(3.0)
    batch.add(3.0, run("4", 230, 2))  # 15 blocks
    batch.advance(6.0)
    assert (batch.preemptions, batch.running, batch.waiting) == (0, 3, 1)


def test_kv_blocks_count() -> None:
    blocks = KvBlocks(100)
    assert blocks.capacity == 6
    blocks.take(4)
    assert blocks.free == 2
    with pytest.raises(AssertionError):
        blocks.take(3)
    blocks.give_back(4)
    with pytest.raises(AssertionError):
        blocks.give_back(1)
    assert [blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


class Slow:
    """The same rules without the shortcuts: every run is touched in every step."""

    def __init__(self, kv: int, batch_max: int, chunk: int) -> None:
        self.capacity, self.batch_max, self.chunk = kv // BLOCK_TOKENS, batch_max, chunk
        self.waiting: list[RunState] = []
        self.running: list[RunState] = []
        self.done: dict[str, int] = {}
        self.preemptions = 0
        self.calls: list[tuple[int, int, list[tuple[int, int]]]] = []

    def held(self, each: RunState) -> int:
        """Blocks: of a prefill all, of a decoding run those of what it has written."""
        return blocks_for(each.prefill_tokens if each.prefill_done < each.prefill_tokens else each.prompt_tokens + each.produced_tokens - 1)

    def decodes(self, each: RunState) -> bool:
        return each.prefill_done == each.prefill_tokens

    def step(self) -> bool:
        """Whether there was anything to do."""
        preempted = False
        while True:
            used = sum(self.held(each) for each in self.running)
            needed = sum(
                blocks_for(each.prompt_tokens + each.produced_tokens) - self.held(each) for each in self.running if self.decodes(each)
            )
            if used + needed <= self.capacity:
                break
            victim = max(self.running, key=lambda each: each.arrival)
            self.running.remove(victim)
            self.waiting.append(victim)
            self.preemptions += 1
            preempted = True
        decoding = [each for each in self.running if self.decodes(each)]
        used += needed
        budget = self.chunk
        chunks: list[tuple[RunState, int]] = []
        for each in self.running:
            if not self.decodes(each):
                chunks.append((each, min(budget, each.prefill_tokens - each.prefill_done)))
                budget -= chunks[-1][1]
        self.waiting.sort(key=lambda each: each.arrival)
        while budget > 0 and self.waiting and not preempted and len(self.running) < self.batch_max:
            each = self.waiting[0]
            need = blocks_for(each.prompt_tokens + each.produced_tokens)
            if used + need + (round(self.capacity * 0.01) if self.running else 0) > self.capacity:
                break
            self.waiting.pop(0)
            used += need
            each.prefill_tokens, each.prefill_done = each.prompt_tokens + each.produced_tokens, 0
            self.running.append(each)
            chunks.append((each, min(budget, each.prefill_tokens)))
            budget -= chunks[-1][1]
        chunks = [(each, tokens) for each, tokens in chunks if tokens]
        if decoding or chunks:
            context_tokens = sum(each.prompt_tokens + each.produced_tokens for each in decoding)
            self.calls.append((len(decoding), context_tokens, [(each.prefill_done, tokens) for each, tokens in chunks]))
        for each, tokens in chunks:
            each.prefill_done += tokens
        for each in decoding + [each for each, _ in chunks if self.decodes(each)]:
            each.produced_tokens += 1
            if each.produced_tokens == each.target_tokens:
                self.running.remove(each)
                self.done[each.run_id] = each.produced_tokens
        return bool(decoding or chunks)


@pytest.mark.parametrize("seed", range(25))
def test_shortcuts_agree_with_touching_every_run_in_every_step(seed: int) -> None:
    dice = random.Random(seed)
    kv, batch_max, chunk = dice.choice([800, 1600, 4000]), dice.choice([4, 16]), dice.choice([64, 300])
    steps = Steps()
    batch = make(steps, kv=kv, batch_max=batch_max, chunk=chunk)
    slow = Slow(kv, batch_max, chunk)
    number = 0
    for second in range(400):
        late: list[RunState] = []
        busy = batch.running + batch.waiting > 0  # then a step is under way, and an arrival now is seen by the next
        for _ in range(dice.choice([0, 0, 1, 2]) if second < 150 else 0):
            number += 1
            prompt, target = dice.randint(1, 200), dice.randint(1, 120)
            batch.add(float(second), run(str(number), prompt, target))
            (late if busy else slow.waiting).append(run(str(number), prompt, target))
        batch.advance(float(second))
        slow.step()
        slow.waiting += late
        batch.advance(second + 1.0)
    batch.advance(10_000.0)
    while slow.step():
        pass
    assert batch.waiting == batch.running == 0
    assert batch.preemptions == slow.preemptions
    assert steps.calls == slow.calls
    assert {each.run_id: each.end for each in batch.progress()} == slow.done
    assert len(slow.done) == number
    assert batch.kv.used == 0


@pytest.mark.parametrize(("policy", "paused"), [("fastserve", True), ("fcfs", False)])
def test_time_without_a_seat_by_the_policy_is_reported(policy: str, paused: bool) -> None:
    """With one seat two runs take turns: from first token to end each has its steps, of a second, and the rest is pause. First come, first
    served pauses nobody."""
    batch = make(batch_max=1, policy=engine_policy(policy, {}))
    for name in "12":
        batch.add(0.0, run(name, 30, 9))
    batch.advance(100.0)
    ends = {each.run_id: each for each in batch.news() if each.done}
    firsts = {"1": 1.0, "2": 10.0}
    if paused:
        assert sum(each.paused_s for each in ends.values()) > 0.0
        for each in ends.values():
            assert each.paused_s == pytest.approx(each.last_s - each.first_s - 8.0)
    else:
        assert {name: (each.paused_s, each.first_s) for name, each in ends.items()} == {name: (0.0, firsts[name]) for name in "12"}
