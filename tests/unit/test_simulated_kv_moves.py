"""Runs that leave the steps of a simulated batch with their KV, and come back; a step takes one second here."""

from __future__ import annotations

from collections.abc import Sequence

from qlm_agent.engines.policies.port import SequenceView
from qlm_agent.engines.policies.registry import FirstComeFirstServed
from qlm_agent.engines.simulated.batching.decoding import DecodingRuns
from qlm_agent.engines.simulated.batching.kv_blocks import BLOCK_TOKENS
from simulated_steps import Steps, make, run, spans_of


def test_a_run_taken_out_keeps_its_kv_until_it_is_released() -> None:
    steps = Steps()
    batch = make(steps)
    batch.add(0.0, run("1", 30, 50))
    batch.add(0.0, run("2", 30, 50))
    batch.advance(3.5)  # in the middle of a step, of which it gets no token
    taken = batch.detach("1")
    assert (batch.decoding_tokens("1"), batch.decoding_tokens("2")) == (None, 32)
    batch.advance(6.0)
    assert spans_of(batch.progress()) == ["1[0:3]", "2[0:6]"]
    assert steps.calls[-1] == (1, 36, [])
    assert batch.kv.used == 2 + 3
    batch.release(taken)
    assert batch.kv.used == 3
    assert batch.attach(6.0, taken)
    assert (batch.kv.used, batch.running) == (2 + 3, 2)
    batch.advance(7.0)
    batch.rejoin(taken)
    batch.advance(9.0)  # the step under way goes on without it
    assert spans_of(batch.progress()) == ["2[6:9]", "1[3:4]"]
    batch.advance(100.0)
    assert {each.run_id: each.end for each in batch.progress()} == {"1": 50, "2": 50}
    assert batch.kv.used == 0


def test_a_run_that_pauses_between_two_steps_ends_once() -> None:
    decoding = DecodingRuns()
    paused = run("1", 30, 3)
    decoding.start(paused)
    decoding.step()
    decoding.stop(paused)
    decoding.start(paused)
    assert [decoding.step(), decoding.step()] == [[], [paused]]


def test_a_batch_that_only_waits_for_a_transfer_has_nothing_due() -> None:
    batch = make(kv=4 * BLOCK_TOKENS)
    batch.add(0.0, run("1", 40, 20))
    batch.advance(1.0)
    taken = batch.detach("1")
    batch.advance(2.0)
    assert batch.next_due_s is None
    batch.add(2.0, run("2", 40, 2))
    assert batch.next_due_s == 2.0
    batch.advance(2.0)
    assert batch.next_due_s is None, "its KV is not free yet"
    batch.release(taken)
    assert batch.next_due_s == 2.0
    batch.advance(4.0)
    assert spans_of(batch.progress()) == ["1[0:1]", "2[0:2]."]


def test_a_restored_run_alone_goes_on_when_its_kv_is_there() -> None:
    batch = make()
    batch.add(0.0, run("1", 40, 3))
    batch.advance(1.0)
    taken = batch.detach("1")
    batch.release(taken)
    batch.advance(2.0)  # the step that it was in
    assert batch.next_due_s is None
    assert batch.attach(5.0, taken)
    batch.advance(6.0)
    assert batch.next_due_s is None
    batch.rejoin(taken)
    assert batch.next_due_s == 6.0
    batch.advance(8.0)
    assert spans_of(batch.progress()) == ["1[0:3]."]


class TurnsAt(FirstComeFirstServed):
    """First come first served until 5 s, last come from then on."""

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return [view.run_id for view in sorted(waiting, key=lambda view: view.arrival if now_s < 5.0 else -view.arrival)]

    def next_wakeup_s(self, now_s: float) -> float | None:
        return 5.0 if now_s < 5.0 else None


def test_a_policy_is_called_again_though_no_step_goes_on() -> None:
    batch = make(kv=6 * BLOCK_TOKENS, policy=TurnsAt())
    batch.add(0.0, run("1", 60, 20))
    batch.advance(1.0)
    batch.detach("1")  # and its KV is on its way for long
    batch.add(1.0, run("2", 60, 2))
    batch.add(1.0, run("3", 10, 2))
    batch.advance(2.0)
    assert (batch.running, batch.waiting) == (0, 2)
    assert batch.next_due_s == 5.0
    batch.advance(5.0)
    assert (batch.running, batch.waiting) == (1, 1)
