"""The policy in charge of vLLM's order: who is admitted, who gives up a seat or KV, and that nothing is lost by it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from qlm_agent.engines.policies.port import SequenceView
from qlm_agent.engines.policies.registry import FirstComeFirstServed
from qlm_agent.engines.policies.urgency import UrgencyFirst
from vllm_in_process import BLOCK_TOKENS, InProcess, prompt_of

GPU_BLOCKS, SEATS = 24, 4


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-cache", "no-prefix-cache"])
def made(request: pytest.FixtureRequest) -> Iterator[InProcess]:
    engine = InProcess(gpu_blocks=GPU_BLOCKS, seats=SEATS, host_blocks=0, prefix_cache=request.param, max_num_batched_tokens=256)
    yield engine
    engine.close()


@pytest.fixture
def vllm(made: InProcess) -> Iterator[InProcess]:
    made.scheduler.engine_policy = UrgencyFirst()
    made.scheduler.preemptions = 0
    yield made
    made.clear()
    assert made.gpu_blocks_free == GPU_BLOCKS, "GPU blocks are lost"


def fill_seats(vllm: InProcess, *, answer: int = 100, **urgency: Any) -> list[str]:
    names = [f"r{number}" for number in range(SEATS)]
    for number, name in enumerate(names):
        vllm.add(name, prompt=prompt_of(number, 20), answer=answer, **urgency)
    vllm.step(3)
    assert vllm.scheduled.keys() == set(names)
    return names


def test_a_run_of_a_lower_band_has_its_first_token_in_the_next_step(vllm: InProcess) -> None:
    expected = [vllm.undisturbed(prompt=prompt_of(number, 20), answer=60) for number in range(SEATS)]
    names = fill_seats(vllm, answer=60, priority=5)
    vllm.add("urgent", prompt=prompt_of(90, 50), answer=10, priority=0)
    vllm.step()
    assert len(vllm.made["urgent"]) == 1
    assert vllm.scheduled.keys() == {"urgent", "r0", "r1", "r2"}, "the latest gives its seat"
    assert vllm.finish(*names) == expected
    assert vllm.scheduler.preemptions == 1


def test_a_deadline_preempts_when_waiting_would_make_it_late_and_not_before(vllm: InProcess) -> None:
    vllm.scheduler.engine_policy = UrgencyFirst(lead_s=600.0)
    fill_seats(vllm, deadline_s=time.monotonic() + 1e6)
    vllm.add("later", prompt=prompt_of(90, 50), answer=10, deadline_s=time.monotonic() + 6000.0)
    vllm.step(2)
    assert vllm.made["later"] == []
    vllm.add("soon", prompt=prompt_of(91, 50), answer=10, deadline_s=time.monotonic() + 500.0)
    vllm.step()
    assert len(vllm.made["soon"]) == 1
    assert vllm.scheduler.preemptions == 1


def test_deadlines_order_those_that_wait(vllm: InProcess) -> None:
    fill_seats(vllm, answer=20, deadline_s=time.monotonic() + 1e6)
    first_at: dict[str, int] = {}
    deadlines = {"w3": 4e6, "w0": 1e6, "w2": 3e6, "w1": 2e6}
    for number, (name, deadline_s) in enumerate(deadlines.items()):
        vllm.add(name, prompt=prompt_of(30 + number, 40), answer=30 - number, deadline_s=time.monotonic() + deadline_s)
    vllm.add("r-first", prompt=prompt_of(40, 200), answer=3, deadline_s=time.monotonic() + 1e5)
    for step in range(200):
        vllm.step()
        for name in ("r-first", *deadlines):
            if vllm.made[name]:
                first_at.setdefault(name, step)
    assert sorted(first_at, key=lambda name: (first_at[name], name)) == ["r-first", "w0", "w1", "w2", "w3"]
    assert first_at["r-first"] < first_at["w3"]
    assert vllm.scheduler.preemptions == 0


def test_several_urgent_ones_each_get_a_seat(vllm: InProcess) -> None:
    fill_seats(vllm, priority=5)
    for number in range(3):
        vllm.add(f"urgent-{number}", prompt=prompt_of(60 + number, 40), answer=4, priority=0)
    vllm.step()
    assert vllm.scheduled.keys() == {"urgent-0", "urgent-1", "urgent-2", "r0"}
    assert vllm.scheduler.preemptions == 3


def test_nobody_is_preempted_while_there_is_room(vllm: InProcess) -> None:
    for number in range(SEATS - 1):
        vllm.add(f"r{number}", prompt=prompt_of(number, 20), answer=30, priority=5)
    vllm.step(2)
    vllm.add("urgent", prompt=prompt_of(90, 50), answer=10, priority=0)
    vllm.step()
    assert len(vllm.scheduled) == SEATS
    assert vllm.scheduler.preemptions == 0


def test_kv_is_freed_for_the_urgent_one(vllm: InProcess) -> None:
    for number in range(3):
        vllm.add(f"r{number}", prompt=prompt_of(number, 200), answer=20, priority=5)  # 7 blocks each, of 24
    vllm.step(4)
    vllm.add("urgent", prompt=prompt_of(90, 250), answer=10, priority=0)
    vllm.step()
    assert vllm.scheduler.preemptions == 1
    assert "urgent" in vllm.scheduled
    vllm.finish("urgent", "r0", "r1", "r2")


def test_nobody_is_preempted_where_that_does_not_make_room(vllm: InProcess) -> None:
    vllm.add("kept", prompt=prompt_of(0, 300), answer=60, priority=0)  # 10 blocks
    for number in range(2):
        vllm.add(f"r{number}", prompt=prompt_of(number, 100), answer=60, priority=5)
    vllm.step(4)
    vllm.add("urgent", prompt=prompt_of(90, 480), answer=10, priority=0)  # 15 blocks, and 14 can be had
    vllm.step(3)
    assert vllm.scheduler.preemptions == 0
    assert vllm.scheduled.keys() == {"kept", "r0", "r1"}
    vllm.finish("urgent")


def test_an_urgent_run_is_considered_again_when_another_ended(vllm: InProcess) -> None:
    """Capacity that could not be freed for it before can be then."""
    vllm.add("kept", prompt=prompt_of(0, 300), answer=10, priority=0)  # 10 blocks
    for number in range(2):
        vllm.add(f"r{number}", prompt=prompt_of(number + 1, 150), answer=150, priority=5)  # 5 blocks each, 10 at the end
    vllm.step(4)
    vllm.add("urgent", prompt=prompt_of(90, 480), answer=10, priority=0)  # 15 blocks, and 14 can be had
    vllm.step(2)
    assert vllm.scheduler.preemptions == 0
    vllm.finish("kept")
    vllm.step(3)
    assert vllm.scheduler.preemptions == 1
    assert vllm.made["urgent"]
    vllm.finish("urgent", "r0", "r1")


def test_an_urgent_run_that_arrived_during_a_pause_has_its_seat_after_it(vllm: InProcess) -> None:
    from vllm.v1.core.sched.interface import PauseState

    fill_seats(vllm, priority=5)
    vllm.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    vllm.add("urgent", prompt=prompt_of(90, 50), answer=4, priority=0)
    vllm.scheduler.schedule()  # as steps do that only move KV
    assert vllm.scheduled == {}
    vllm.scheduler.set_pause_state(PauseState.UNPAUSED)
    vllm.step()
    assert len(vllm.made["urgent"]) == 1


def test_nobody_starves_behind_an_endless_stream_of_urgent_ones(vllm: InProcess) -> None:
    vllm.scheduler.engine_policy = UrgencyFirst(preemptions_max=3)
    vllm.add("patient", prompt=prompt_of(0, 20), answer=60, priority=5)
    vllm.step(3)
    number = 0
    while "patient" not in vllm.finished and number < 400:
        waiting = len(vllm.scheduler.waiting)
        if waiting < 1:
            vllm.add(f"u{number}", prompt=prompt_of(number, 10), answer=8, priority=0)
            number += 1
        vllm.step()
    assert "patient" in vllm.finished
    assert 1 <= vllm.scheduler.preemptions <= 3


class Adverse(FirstComeFirstServed):
    """Orders, preempts and picks victims by the dice: the worst that a policy may do."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return self._shuffled(waiting)

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return self._shuffled(running) if self._dice.random() < 0.2 else ()

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return self._shuffled(running)

    def next_wakeup_s(self, now_s: float) -> float | None:
        return now_s

    def _shuffled(self, views: Sequence[SequenceView]) -> list[str]:
        return self._dice.sample([view.run_id for view in views], len(views))


@pytest.mark.parametrize("seed", range(4))
def test_output_is_the_same_whatever_the_policy_does(vllm: InProcess, seed: int) -> None:
    dice = random.Random(seed)
    wanted = {f"r{number}": (prompt_of(seed * 20 + number, dice.randint(1, 300)), dice.randint(2, 60)) for number in range(10)}
    expected = {name: vllm.undisturbed(prompt=prompt, answer=answer) for name, (prompt, answer) in wanted.items()}
    vllm.scheduler.engine_policy = Adverse(seed)
    for name, (prompt, answer) in wanted.items():
        vllm.add(name, prompt=prompt, answer=answer)
        vllm.step(dice.randint(0, 6))
    vllm.finish(*wanted)
    assert vllm.scheduler.preemptions > 0
    assert {name: vllm.made[name] for name in wanted} == expected


class Wrong(FirstComeFirstServed):
    """Names runs that were not shown, some twice, and leaves others out."""

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return ["nobody", *[view.run_id for view in waiting[1:2]] * 2]

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return ["nobody", waiting[0].run_id]

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return ["nobody"]


def test_a_policy_that_answers_nonsense_loses_nobody(vllm: InProcess) -> None:
    vllm.scheduler.engine_policy = Wrong()
    for number in range(8):
        vllm.add(f"r{number}", prompt=prompt_of(number, 150), answer=60)
    vllm.finish(*(f"r{number}" for number in range(8)))


def test_a_prefill_in_chunks_is_preempted_and_begins_again(vllm: InProcess) -> None:
    expected = vllm.undisturbed(prompt=prompt_of(5, 450), answer=20)
    for number in range(SEATS - 1):
        vllm.add(f"r{number}", prompt=prompt_of(number, 10), answer=60, priority=0)
    vllm.step()
    vllm.add("long", prompt=prompt_of(5, 450), answer=20, priority=5)
    vllm.step()
    assert vllm.scheduled["long"] < 450
    vllm.add("urgent", prompt=prompt_of(70, 10), answer=4, priority=0)
    vllm.step()
    assert "long" not in vllm.scheduled
    assert "urgent" in vllm.scheduled
    assert vllm.finish("long") == [expected]


def test_a_run_whose_prefix_others_hold_needs_only_the_rest(vllm: InProcess) -> None:
    shared = prompt_of(5, 10 * BLOCK_TOKENS)
    vllm.add("first", prompt=[*shared, 9], answer=60, priority=5)
    vllm.step(4)
    vllm.add("other", prompt=prompt_of(6, 200), answer=60, priority=5)
    vllm.step(2)
    vllm.add("urgent", prompt=[*shared, 10], answer=4, priority=0)
    vllm.step()
    cached = vllm.core.vllm_config.cache_config.enable_prefix_caching
    assert vllm.scheduler.preemptions == (0 if cached else 1)
    vllm.finish("urgent")


@pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")  # of vLLM's own call of xgrammar
def test_an_urgent_run_with_a_grammar_has_a_seat_as_soon_as_the_grammar_is_there() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    vllm = InProcess(gpu_blocks=GPU_BLOCKS, seats=SEATS, host_blocks=0, skip_tokenizer_init=False)
    try:
        fill_seats(vllm, answer=160, priority=5)
        grammar = StructuredOutputsParams(regex="[a-z]{40}")
        vllm.add("urgent", prompt=prompt_of(90, 50), answer=4, priority=0, sampling={"structured_outputs": grammar})
        vllm.finish("urgent")
        assert vllm.scheduler.preemptions == 1
        assert not vllm.finished & {"r0", "r1", "r2", "r3"}
    finally:
        vllm.close()
