"""FastServe's queues and KV of paused runs, on the simulated engine: claims of sections 4.1 and 4.2."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_agent.engines.policies.port import EnginePolicy, Sequences
from qlm_agent.engines.policies.registry import engine_policy
from qlm_agent.engines.simulated.batch import SimulatedBatch
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
    if rule == "reactive":
        assert batch.kv_stalled_s > 0.1
    assert (batch.kv_used_tokens, batch.host_kv_tokens) == (0, 0)


RUNS = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 700), st.integers(1, 60)), min_size=1, max_size=25)


@pytest.mark.parametrize("name", ["fastserve", "mlfq-naive", "fixed-priority"])
@pytest.mark.parametrize("rule", KV_RULES)
@given(arrivals=RUNS, batch_max=st.integers(1, 5), host=st.sampled_from([0, 600, 100_000]), aborted=st.integers(0, 30))
@settings(max_examples=25, deadline=None)
def test_every_run_ends_whatever_arrives(
    name: str, rule: str, arrivals: list[tuple[float, int, int]], batch_max: int, host: int, aborted: int
) -> None:
    """No deadlock and, all arrivals being over, no starvation: steps are bounded by tokens and prefills. With recompute and promotion, the
    deadlock that section 4.2 warns of: a run is dropped only for a run that makes a token in the next step."""
    batch = make(engine_policy(name, {"kv": rule}), kv=800, batch_max=batch_max, host=host)
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
    """One owner of preemption: what the policy paused the agent's eviction leaves alone."""
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
