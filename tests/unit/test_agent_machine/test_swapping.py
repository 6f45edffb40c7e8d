"""Which model is active (QLM section 5, model swapping)."""

from __future__ import annotations

from qlm_agent.engine import Tier
from qlm_agent.events import LoadAsked, Message, ModelNotLoaded, Outcome, Told

from .transcript import Transcript, ended, pulled

DONE = Outcome.DONE


def busy() -> Transcript:
    """One run of m on the engine, and the head of the queue is of n."""
    t = Transcript()
    t.serve()
    assert t.answer_pull(pulled("1"), head="n") == ["start 1", "load n warm"]
    return t


def test_next_model_is_warmed_and_becomes_active_when_the_batch_is_done() -> None:
    t = busy()
    assert t.loaded("n", Tier.WARM, active="m", warm=("n",))[:1] == ["pull m x100"]
    assert t.answer_pull(head="n") == []  # nothing more of the old model
    assert t.end(ended("1", 3)) == ["load n active", "complete 1[0:3]=STOP"]
    assert t.machine.swapping.swapping_to == "n"
    assert t.step(Told(message=Message.WAKE)) == []  # no pull during the swap
    assert t.loaded("n", warm=("m",)) == ["pull n x100"]


def test_a_swap_waits_for_the_warming_under_way() -> None:
    t = busy()
    assert t.end(ended("1", 3)) == ["complete 1[0:3]=STOP"]
    assert t.loaded("n", Tier.WARM, active="m", warm=("n",))[0] == "load n active"


def test_a_swap_waits_for_the_pull_under_way() -> None:
    t = Transcript()
    t.serve()
    t.answer_pull(pulled("1"), head="m")
    assert "pull" in t.calls
    assert t.end(ended("1", 1)) == ["complete 1[0:1]=STOP"]
    assert t.answer_pull(head="n") == ["load n active"]


def test_a_swap_does_not_wait_for_ends_to_be_written() -> None:
    t = busy()
    t.loaded("n", Tier.WARM, active="m", warm=("n",))
    t.answer_pull(head="n")
    assert t.end(ended("1", 3)) == ["load n active", "complete 1[0:3]=STOP"]


def test_head_comes_back_to_the_active_model() -> None:
    t = busy()
    t.loaded("n", Tier.WARM, active="m", warm=("n",))
    t.answer_pull(head="n")
    assert t.step(Told(message=Message.HEAD_CHANGED)) == ["pull m x100"]
    assert t.answer_pull(pulled("2"), head="n") == ["start 2"]


def test_a_model_that_cannot_be_warm_is_still_made_active() -> None:
    t = busy()
    failed = ModelNotLoaded(model="n", tier=Tier.WARM, message="no room", active="m", warm=())
    assert t.step(failed) == []
    t.step(Told(message=Message.HEAD_CHANGED))
    assert t.answer_pull(head="n") == []  # not tried again
    assert t.end(ended("1", 1))[0] == "load n active"


def test_a_failed_load_is_tried_again_after_a_while() -> None:
    t = Transcript()
    t.register()
    t.answer_pull(head="n")
    failed = ModelNotLoaded(model="n", tier=Tier.ACTIVE, message="broken", active="", warm=())
    assert t.step(failed) == []
    assert t.wake() == ["load n active"]
    assert t.now_s == 0.5
    assert t.step(failed) == []
    assert t.wake() == ["load n active"]
    assert t.now_s == 1.5


def test_a_head_that_is_not_served_here_is_left() -> None:
    t = Transcript("m")
    t.register()
    assert t.answer_pull(head="x") == []


def test_models_are_moved_on_request() -> None:
    t = Transcript("m", "n", "o")
    t.serve()
    t.answer_pull()
    assert t.step(LoadAsked(ask=1, model="n", tier=Tier.WARM)) == ["load n warm"]
    assert t.step(LoadAsked(ask=2, model="n", tier=Tier.WARM)) == []
    assert t.step(LoadAsked(ask=3, model="o", tier=Tier.WARM)) == ["answer 3 MODEL_BUSY"]  # one transfer at a time
    answered = t.loaded("n", Tier.WARM, active="m", warm=("n",))
    assert answered[:2] == ["answer 1 done", "answer 2 done"]
    assert t.step(LoadAsked(ask=4, model="n", tier=Tier.WARM)) == ["answer 4 done"]
    assert t.step(LoadAsked(ask=5, model="m", tier=Tier.WARM)) == ["answer 5 done"]
    assert t.step(LoadAsked(ask=6, model="m", tier=Tier.COLD)) == ["answer 6 MODEL_BUSY"]  # active
    assert t.step(LoadAsked(ask=7, model="x", tier=Tier.COLD)) == ["answer 7 UNKNOWN_MODEL"]
    assert t.step(LoadAsked(ask=8, model="n", tier=Tier.COLD)) == ["load n cold"]
    assert t.loaded("n", Tier.COLD, active="m", warm=())[:1] == ["answer 8 done"]
