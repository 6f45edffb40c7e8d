"""Output, ends and give-backs: at once, coalesced, repeated, in order, bounded."""

from __future__ import annotations

from qlm_agent.decisions.events import ControlMessage, DrainCommand, Message, Outcome
from qlm_agent.engines.port import FailureKind

from .transcript import Transcript, ended, pulled

DONE, STALE, GAP, ENDED = Outcome.DONE, Outcome.STALE, Outcome.GAP, Outcome.ENDED


def serving(*names: str, **settings: object) -> Transcript:
    """With these runs on the engine and their first tokens stored."""
    t = Transcript(**settings)
    t.serve()
    assert t.answer_pull(*(pulled(name) for name in names)) == [f"start {name}" for name in names]
    for name in names:
        t.produce((name, 1))
        t.answer_items("emit", DONE)
    return t


def test_first_output_of_a_resumed_run_is_sent_at_once_from_its_offset() -> None:
    t = Transcript()
    t.serve()
    t.answer_pull(pulled("1", stored=40))
    assert t.produce(("1", 2)) == ["emit 1[40:42]"]


def test_output_of_all_runs_goes_in_one_call() -> None:
    t = serving("1", "2", "3")
    t.at(1.0).produce(("1", 1), ("2", 2))
    t.at(1.04).produce(("3", 1), ("2", 1))
    assert t.wake() == ["emit 1[1:2] 2[1:4] 3[1:2]"]
    assert t.now_s == 1.05


def test_a_first_output_does_not_take_the_others_along() -> None:
    t = serving("1")
    t.step(ControlMessage(message=Message.WAKE))
    t.answer_pull(pulled("2"))
    t.at(1.0).produce(("1", 1))
    assert t.at(1.01).produce(("2", 1)) == ["emit 2[0:1]"]
    t.answer_items("emit", DONE)
    assert t.wake() == ["emit 1[1:2]"]


def test_one_output_call_at_a_time_and_nothing_is_left_behind() -> None:
    t = serving("1")
    t.at(1.0).produce(("1", 1))
    assert t.wake() == ["emit 1[1:2]"]
    assert t.produce(("1", 3)) == []
    assert t.answer_items("emit", DONE) == []
    assert t.wake() == ["emit 1[2:5]"]


def test_an_end_waits_for_the_output_call_of_its_run_only() -> None:
    t = serving("1", "2")
    t.at(1.0).produce(("1", 1))
    assert t.wake() == ["emit 1[1:2]"]
    assert t.end(ended("1", 1), ended("2", 1)) == ["complete 2[1:2]=STOP"]
    assert t.answer_items("emit", DONE) == []
    assert t.answer_items("complete", DONE) == ["forget 2 written", "complete 1[2:3]=STOP"]


def test_a_rebound_gateway_gets_what_is_held() -> None:
    t = serving("1")
    assert t.at(1.0).produce(("1", 2)) == []
    assert t.step(ControlMessage(message=Message.GATEWAY_REBOUND, run_id="1/1")) == ["emit 1[1:3]"]


def test_cancel_aborts_and_later_output_is_dropped() -> None:
    t = serving("1")
    t.produce(("1", 2))
    assert t.step(ControlMessage(message=Message.CANCEL, run_id="1/1")) == ["abort 1", "forget 1 not owned"]
    assert t.produce(("1", 2)) == []
    assert t.end(ended("1", 1)) == []
    assert t.machine.runs.held_tokens == 0


def test_cancel_of_another_attempt_changes_nothing() -> None:
    t = serving("1")
    assert t.step(ControlMessage(message=Message.CANCEL, run_id="1/2")) == []


def test_a_stale_answer_aborts() -> None:
    t = serving("1", "2")
    t.produce(("1", 2), ("2", 1))
    assert t.wake() == ["emit 1[1:3] 2[1:2]"]
    assert t.answer_items("emit", STALE, DONE) == ["abort 1", "forget 1 not owned"]


def test_a_stale_end_is_forgotten() -> None:
    t = serving("1")
    t.end(ended("1", 1))
    assert t.answer_items("complete", STALE) == ["forget 1 not owned"]
    assert t.machine.delivery.finished == 0


def test_progress_that_the_server_lost_is_sent_again() -> None:
    t = serving("1")
    t.produce(("1", 4))
    assert t.wake() == ["emit 1[1:5]"]
    assert t.answer_items("emit", GAP) == ["read owned"]
    assert t.produce(("1", 1)) == []
    assert t.answer_owned(pulled("1", stored=0)) == ["emit 1[0:6]"]


def test_an_end_after_a_gap_carries_all_that_is_missing() -> None:
    t = serving("1")
    t.end(ended("1", 4))
    assert t.answer_items("complete", GAP) == ["read owned"]
    assert t.answer_owned(pulled("1", stored=0)) == ["complete 1[0:5]=STOP"]


def test_a_gap_of_a_run_that_is_not_owned_any_more() -> None:
    t = serving("1")
    t.produce(("1", 4))
    t.wake()
    t.answer_items("emit", GAP)
    assert t.answer_owned() == ["abort 1", "forget 1 not owned"]


def test_a_run_that_the_engine_broke_goes_back_with_what_it_made() -> None:
    t = serving("1")
    assert t.end(ended("1", 2, failure=FailureKind.BROKEN)) == ["emit 1[1:3]"]
    assert t.answer_items("emit", DONE) == ["give back 1 failed"]
    assert t.answer_items("give back", ENDED) == ["forget 1 given_back"]  # it had failed too often: the server ended it


def test_runs_that_the_engine_broke_together_are_suspects() -> None:
    """Any of them may have done it. One that broke alone, on an engine that serves, did."""
    t = serving("1", "2", "3")
    assert t.end(*(ended(name, failure=FailureKind.BROKEN) for name in ("1", "2")))[-1] == "give back 1 2 suspected"
    t.answer_items("give back", DONE, DONE)
    assert t.end(ended("3", failure=FailureKind.BROKEN))[-1] == "give back 3 failed"


def test_what_a_returning_run_made_is_stored_before_it_goes() -> None:
    t = serving("1", "2")
    t.produce(("2", 1))
    assert t.wake() == ["emit 2[1:2]"]
    assert t.end(ended("1", 2, failure=FailureKind.BROKEN)) == []  # one output call at a time
    assert t.answer_items("emit", DONE) == ["emit 1[1:3]"]
    assert t.answer_items("emit", DONE) == ["give back 1 failed"]


def test_a_run_that_the_engine_refused_fails() -> None:
    t = serving("1", "2")
    refused, too_big = ended("1", failure=FailureKind.REFUSED), ended("2", 1, failure=FailureKind.KV_CAPACITY)
    assert t.end(refused, too_big) == ["complete 1[1:1]=ENGINE_FAILURE 2[1:2]=KV_CAPACITY_EXCEEDED"]


# The server is away --------------------------------------------------------------------------------------------------------


def test_output_waits_for_the_server_and_goes_out_whole() -> None:
    t = serving("1")
    t.produce(("1", 1))
    t.wake()
    assert t.lose("emit") == []
    assert t.produce(("1", 2)) == []
    first_s = t.now_s
    assert t.wake() == ["emit 1[1:4]"]
    assert t.lose("emit") == []
    assert t.wake() == ["emit 1[1:4]"]
    assert t.now_s - first_s > 0.1  # the waits grow
    for _ in range(10):
        t.lose("emit")
        began_s = t.now_s
        t.wake()
        assert t.now_s - began_s <= 1.0  # but not beyond a second
    assert t.answer_items("emit", DONE) == []


def test_calls_that_were_lost_together_count_once() -> None:
    t = serving("1", "2", "3")
    t.produce(("1", 1))
    t.wake()
    t.end(ended("2", 1), ended("3", 1, failure=FailureKind.BROKEN))
    began_s = t.now_s
    t.lose("emit")
    t.lose("complete")
    assert len(t.wake()) == 2
    assert t.now_s - began_s <= 0.051


def test_ends_wait_for_the_server() -> None:
    t = serving("1", "2")
    t.end(ended("1", 2))
    assert t.lose("complete") == []
    t.end(ended("2", 2))
    assert t.wake() == ["complete 1[1:3]=STOP 2[1:3]=STOP"]
    assert t.answer_items("complete", DONE, DONE) == ["forget 1 written", "forget 2 written"]


def test_the_engine_pauses_when_too_much_is_held() -> None:
    t = serving("1", buffer_tokens_max=100)
    t.produce(("1", 60))
    assert t.wake() == ["emit 1[1:61]"]
    assert t.lose("emit") == []
    assert t.produce(("1", 60)) == ["pause"]
    assert t.machine.runs.held_tokens == 120
    assert t.step(ControlMessage(message=Message.WAKE)) == []  # takes no more requests either
    assert t.wake() == ["emit 1[1:121]"]
    assert t.answer_items("emit", DONE) == ["resume", "pull m x100"]


def test_late_answers_change_nothing() -> None:
    t = serving("1")
    t.produce(("1", 1))
    t.wake()
    late = t.calls["emit"]
    t.lose("emit")
    t.wake()
    t.answer_items("emit", DONE)
    t.calls["emit"] = late
    assert t.answer_items("emit", STALE) == []
    assert "1/1" in t.machine.runs


def test_what_cannot_be_continued_faithfully_goes_on_elsewhere_all_the_same_when_its_engine_fails_or_its_agent_leaves() -> None:
    t = Transcript()
    t.serve()
    t.answer_pull(*(pulled(name, resumable=False) for name in ("1", "2")))
    t.produce(("1", 1), ("2", 1))
    t.answer_items("emit", DONE, DONE)
    assert t.end(ended("1", failure=FailureKind.BROKEN))[-1] == "give back 1 failed"
    t.answer_items("give back", DONE)
    assert "give back 2 drained" in t.step(DrainCommand(finish_s=0.0, stop=True))
