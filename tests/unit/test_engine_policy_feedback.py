"""FastServe's queues and KV of paused runs, on the simulated engine: claims of sections 4.1 and 4.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_agent.engines.policies.feedback import FastServe
from qlm_agent.engines.policies.port import EnginePolicy, KvRule, Residence, Sequences, SequenceView
from qlm_agent.engines.policies.registry import engine_policy
from qlm_agent.engines.simulated.batching.batch import SimulatedBatch
from qlm_agent.engines.simulated.batching.batch_state import BatchState
from qlm_agent.engines.simulated.batching.kv_blocks import BLOCK_TOKENS
from qlm_agent.engines.simulated.batching.paused_kv import BURST_WINDOWS, PausedKv
from simulated_steps import run

KV_RULES = ("recompute", "defer", "reactive", "proactive")
PREFILLS_S = {250: 2.5, 100: 1.0, 50: 0.5}
"""Figure 7: seconds of the initialization phase by prompt; the decoding phase is one step of 0.5 s."""


def figure_step_s(decoding: int, context_tokens: int, prefills: Sequence[tuple[int, int]]) -> float:
    return 0.5 * decoding + sum(PREFILLS_S[tokens] for _, tokens in prefills)


class ShortestRemaining(EnginePolicy):
    """The oracle of figure 7."""

    oracle = True

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        left_s = {each.run_id: PREFILLS_S[each.prompt_tokens] + 0.5 * (each.true_tokens - 1) for each in waiting}
        return sorted(left_s, key=left_s.__getitem__)

    def victims(self, now_s: float, running: Sequences) -> Sequence[str]:
        return running.names(running.column("arrival").argsort())


@pytest.mark.parametrize(
    ("policy", "mean_s"),
    [
        (engine_policy("fcfs", {}), 13 / 3),
        (engine_policy("mlfq-naive", {"quantum_s": 1.0, "queues": 4, "promote_s": 100.0}), 5.0),
        (engine_policy("fastserve", {"quantum_s": 1.0, "queues": 4, "promote_s": 100.0}), 10 / 3),
        (ShortestRemaining(), 3.0),
    ],
    ids=["fcfs", "naive", "skip-join", "srpt"],
)
def test_the_worked_example_of_figure_7(policy: EnginePolicy, mean_s: float) -> None:
    """The paper prints 4.23 for FCFS, where 3, 4.5 and 5.5 give 4.33."""
    batch = SimulatedBatch(step_s=figure_step_s, kv_capacity_tokens=10_000, batch_max=1, prefill_chunk_tokens=10_000, policy=policy)
    for name, prompt in (("1", 250), ("2", 100), ("3", 50)):
        batch.add(0.0, run(name, prompt, 2))
    batch.advance(10.0)
    ends_s = [each.last_s for each in batch.progress() if each.done]
    assert len(ends_s) == 3
    assert sum(ends_s) / 3 == pytest.approx(mean_s)


# Queues, section 4.1 --------------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """A decode step takes 10 ms, a prefill 10 ms for each of its tokens."""

    seats: int

    def expected_step_s(self, decoding: int, context_tokens: int, prefills: Sequence[tuple[int, int]]) -> float:
        return 0.01 * (decoding + sum(tokens for _, tokens in prefills))


def view(number: int, prefill_steps: int, *, since_s: float = 0.0, served_s: float = 0.0) -> SequenceView:
    """A run whose prefill takes so many times the least step."""
    return SequenceView(
        run_id=str(number),
        arrival=number,
        deadline_s=float("inf"),
        priority=0,
        prompt_tokens=prefill_steps,
        produced_tokens=0,
        waiting_since_s=since_s,
        served_s=served_s,
    )


def fastserve(seats: int, **options: Any) -> FastServe:
    policy = FastServe(**options)
    policy.reset(Engine(seats))  # type: ignore[arg-type]
    return policy


def order(policy: FastServe, now_s: float, *waiting: SequenceView, running: Sequence[SequenceView] = ()) -> list[str]:
    return list(policy.order(now_s, Sequences(waiting), Sequences(running)))


def test_a_run_joins_the_first_queue_whose_quantum_holds_its_prefill_and_the_last_if_none_does() -> None:
    """Quanta of 1, 2, 4 and 8 least steps; in a queue the first to enter is first."""
    steps = (900, 9, 8, 5, 4, 3, 2, 1)
    assert order(fastserve(10, queues=4), 0.0, *(view(number, each) for number, each in enumerate(steps))) == list("76450123")


@pytest.mark.parametrize(("demotion", "expected"), [(1, "102"), (2, "120"), (9, "120")])
def test_a_run_that_used_up_its_quantum_moves_so_many_queues_down(demotion: int, expected: str) -> None:
    """From the first queue, behind one that is in the second already, or in the third, which is the last."""
    policy = fastserve(3, queues=3, demotion=demotion)
    runs = view(0, 1), view(1, 2), view(2, 3)
    assert order(policy, 0.0, *runs) == ["0", "1", "2"]
    runs[0].served_s = 0.01
    order(policy, 0.01, *runs[1:], running=runs[:1])
    assert order(policy, 0.02, *runs) == list(expected)


def test_kv_leaves_in_the_order_of_the_estimated_next_schedule_the_latest_first() -> None:
    """ENST = min(time to promotion, work ahead / batch), section 4.2. Two seats; quanta of 10, 20, 40 and 80 ms. Work ahead of a run: of
    each run in a higher queue, the quanta from that queue to its own. For 3 and 4 that is (30 + 2 x 20) / 2 = 35 ms and (70 + 2 x 60 +
    40) / 2 = 115 ms. 5 is in the last queue too and will be promoted in 20 ms, before any of them."""
    policy = fastserve(2, queues=4)
    runs = view(0, 1), view(1, 2), view(2, 2), view(3, 4), view(4, 8), view(5, 8, since_s=-0.28)
    order(policy, 0.0, *runs)
    enst_s = {1: 5.0, 2: 5.0, 3: 35.0, 4: 115.0, 5: 20.0}
    found = list(policy.victims(0.0, Sequences(runs[1:])))
    assert found == ["4", "3", "5", "2", "1"]
    assert [enst_s[int(name)] for name in found] == sorted(enst_s.values(), reverse=True)
    policy.order(0.2, Sequences(runs), Sequences(()))
    assert list(policy.victims(0.25, Sequences(runs[3:5]))) == ["4", "3"], "both will be promoted in 50 ms: the lower queue first"


# KV of paused runs, section 4.2 ---------------------------------------------------------------------------------------


def paused(kv: PausedKv, state: BatchState, *numbers: int) -> list[Any]:
    """Paused runs with ten blocks each on the GPU, the first to be seated first."""
    runs = [run(str(number), 10 * BLOCK_TOKENS, 2) for number in numbers]
    for each in runs:
        each.residence, each.moving_blocks = Residence.GPU, 10
        state.kv.take(10)
        state.paused[each.run_id] = each
    return runs


def where(runs: Sequence[SequenceView]) -> list[Residence]:
    return [each.residence for each in runs]


def test_copies_go_out_the_latest_first_and_return_the_earliest_first() -> None:
    state = BatchState(kv_capacity_tokens=40 * BLOCK_TOKENS, batch_max=2)
    kv = PausedKv(state, KvRule.PROACTIVE, lambda tokens: 1.0, 1_000)
    runs = paused(kv, state, 1, 2, 3, 4)
    kv.move_ahead(0.0, runs, 10)
    assert where(runs) == [Residence.GPU] * 3 + [Residence.MOVING]
    assert state.kv.free == 0, "its room is free when the copy is over"
    kv.settle(1.0)
    kv.move_ahead(1.0, runs, 20)
    kv.settle(2.0)
    assert where(runs) == [Residence.GPU] * 2 + [Residence.HOST] * 2
    assert (state.kv.free, kv.host_blocks, kv.take_stall_s()) == (20, 20, 0.0), "no step waited"
    kv.move_ahead(2.0, runs, 0)
    assert where(runs) == [Residence.GPU] * 2 + [Residence.MOVING, Residence.HOST]


def test_room_is_kept_for_a_burst_as_large_as_lately() -> None:
    state = BatchState(kv_capacity_tokens=40 * BLOCK_TOKENS, batch_max=1)
    kv = PausedKv(state, KvRule.PROACTIVE, lambda tokens: 0.1, 1_000)
    runs = paused(kv, state, 1, 2, 3)
    state.prefilling["9"] = run("9", 10, 2)  # somebody runs
    kv.bursts.add(0.2, 9)
    kv.bursts.add(0.7, 6)  # in the same second
    kv.bursts.add(1.2, 3)
    assert kv.bursts.most() == 15
    assert kv.wants_moves(0), "10 blocks are free"
    kv.move_ahead(1.5, runs, 0)
    assert where(runs) == [Residence.GPU] * 2 + [Residence.MOVING]
    for second in range(2, 2 + BURST_WINDOWS):
        kv.bursts.add(float(second), 1)
    assert kv.bursts.most() == 1, "it was long ago"


def test_turns_of_runs_that_cannot_both_hold_kv_go_on_under_recompute() -> None:
    """The deadlock of section 4.2: each is promoted at once and drops the other's KV. Every drop is paid by a token."""
    batch = make(engine_policy("fastserve", {"kv": "recompute", "quantum_s": 0.001, "promote_s": 0.001}), kv=480, batch_max=1)
    for name in "12":
        batch.add(0.0, run(name, 400, 30))
    batch.advance(100.0)
    assert [each.end for each in batch.progress() if each.done] == [30, 30]
    assert 10 < batch.preemptions <= 60


def step_s(decoding: int, context_tokens: int, prefills: Sequence[tuple[int, int]]) -> float:
    return 0.02 + 0.0002 * decoding + 0.0001 * sum(tokens for _, tokens in prefills)


def make(policy: EnginePolicy, *, kv: int = 1_600, batch_max: int = 4, host: int = 100_000, chunk: int = 100_000) -> SimulatedBatch:
    return SimulatedBatch(
        step_s=step_s,
        kv_capacity_tokens=kv,
        batch_max=batch_max,
        prefill_chunk_tokens=chunk,
        policy=policy,
        kv_swap_s=lambda tokens: 0.00002 * tokens,
        host_kv_tokens=host,
    )


def test_a_long_prefill_joins_a_low_queue_and_is_promoted_with_it() -> None:
    """Short runs that arrive later are first; the long one starves until its promotion, and then prefills whole in one turn."""
    batch = make(engine_policy("fastserve", {"promote_s": 1.0}), batch_max=1)
    batch.add(0.0, run("9999", 1_200, 2))
    batch.add(0.0, run("9998", 10, 3))
    first_s = None
    for number in range(1, 60):
        batch.advance(0.05 * number)
        first_s = next((each.first_s for each in batch.progress() if each.run_id == "9999"), first_s)
        batch.add(0.05 * number, run(str(number), 10, 3))
    assert first_s is not None
    assert 1.0 < first_s < 1.5


def test_a_paused_run_keeps_its_kv_and_is_not_computed_again() -> None:
    prefills: list[int] = []

    def counted(decoding: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        prefills.extend(tokens for _, tokens in chunks)
        return 0.02

    batch = SimulatedBatch(
        step_s=counted,
        expected_step_s=step_s,
        kv_capacity_tokens=10_000,
        batch_max=1,
        prefill_chunk_tokens=10_000,
        policy=engine_policy("fastserve", {"quantum_s": 0.02}),
    )
    for name in ("1", "2", "3"):
        batch.add(0.0, run(name, 100, 40))
    batch.advance(1.0)
    assert (batch.running, batch.waiting) == (1, 2)
    assert batch.kv_used_tokens > 300
    batch.advance(100.0)
    assert sorted(each.end for each in batch.progress()) == [40, 40, 40]
    assert prefills == [100, 100, 100]
    assert (batch.preemptions, batch.kv_used_tokens) == (0, 0)


@pytest.mark.parametrize("rule", KV_RULES)
def test_a_shortage_is_met_by_the_rule(rule: str) -> None:
    batch = make(engine_policy("fastserve", {"quantum_s": 0.02, "kv": rule}), batch_max=2)
    for number in range(8):
        batch.add(0.0, run(str(number + 1), 300, 60))
    host = 0
    for step in range(1_000):
        batch.advance(step * 0.05)
        host = max(host, batch.host_kv_tokens)
    assert len([each for each in batch.progress() if each.done]) == 8
    least, most = {"recompute": (5, 500), "defer": (0, 2)}.get(rule, (0, 0))  # decodes that outgrow KV are a shortage under every rule
    assert least <= batch.preemptions <= most
    assert (host > 0) == (rule in ("reactive", "proactive"))
    assert (batch.kv_stalled_s > 0.1) == (rule == "reactive"), "proactive copies go beside the steps"
    assert (batch.kv_used_tokens, batch.host_kv_tokens) == (0, 0)


RUNS = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 700), st.integers(1, 60)), min_size=1, max_size=25)


@pytest.mark.parametrize("name", ["fastserve", "mlfq-naive", "fixed-priority"])
@pytest.mark.parametrize("rule", KV_RULES)
@given(
    arrivals=RUNS,
    batch_max=st.integers(1, 5),
    host=st.sampled_from([0, 600, 100_000]),
    aborted=st.integers(0, 30),
    chunk=st.sampled_from([64, 100_000]),
)
@settings(max_examples=25, deadline=None)
def test_every_run_ends_whatever_arrives(
    name: str, rule: str, arrivals: list[tuple[float, int, int]], batch_max: int, host: int, aborted: int, chunk: int
) -> None:
    """No deadlock and, all arrivals being over, no starvation: steps are bounded by tokens and prefills. With recompute and promotion, the
    deadlock that section 4.2 warns of: a run is dropped only for a run that makes a token in the next step."""
    batch = make(engine_policy(name, {"kv": rule}), kv=800, batch_max=batch_max, host=host, chunk=chunk)
    ended: set[str] = set()
    for number, (at_s, prompt, target) in enumerate(sorted(arrivals), start=1):
        batch.advance(at_s)
        batch.add(at_s, run(str(number), prompt, target))
        if number == aborted:
            batch.abort(str(number))
            ended.add(str(number))
    now_s = 2.0
    for _ in range(len(arrivals) * 2_000):
        ended |= {each.run_id for each in batch.progress() if each.done}
        if len(ended) == len(arrivals):
            break
        assert batch.next_due_s is not None, "nothing will happen"
        now_s = max(now_s, batch.next_due_s)
        batch.advance(now_s)
    assert len(ended) == len(arrivals), batch
    batch.advance(now_s + 100.0)
    assert (batch.kv_used_tokens, batch.host_kv_tokens, batch.waiting) == (0, 0, 0)


def test_the_agent_cannot_offload_a_paused_run() -> None:
    """One owner of preemption: the agent's eviction leaves runs paused by the policy."""
    batch = make(engine_policy("fastserve", {}), batch_max=1)
    for name in ("1", "2"):
        batch.add(0.0, run(name, 50, 50))
    batch.advance(1.0)
    decoding = [name for name in ("1", "2") if batch.decoding_tokens(name) is not None]
    assert len(decoding) == 1
    batch.release(batch.detach(decoding[0]))
    batch.advance(10.0)
    assert [each.end for each in batch.progress() if each.done] == [50]


def test_nobody_waits_for_ever_while_short_runs_keep_arriving() -> None:
    """Section 4.1: a starved run is promoted. Under fixed priority the long prompt starves."""
    ends: dict[str, int] = {}
    for name in ("fastserve", "fixed-priority"):
        batch = make(engine_policy(name, {}), kv=10_000, batch_max=1)
        batch.add(0.0, run("9999", 1_000, 10))
        for number in range(1, 2_000):
            batch.add(0.06 * number, run(str(number), 10, 3))
            batch.advance(0.06 * number)
            if any(each.run_id == "9999" and each.done for each in batch.progress()):
                ends[name] = number
                break
    assert set(ends) == {"fastserve"}
