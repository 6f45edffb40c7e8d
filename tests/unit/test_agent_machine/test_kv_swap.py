"""KV moves to host memory and back (QLM section 5, GPU-CPU state swapping)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm_agent.decisions.events import ControlMessage, DrainCommand, LeaseLoss, Message, ModelNotLoaded, Outcome, TimePassed
from qlm_agent.engines.port import Tier

from .transcript import HARDWARE, Transcript, ended, group, profile, pulled

DONE = Outcome.DONE


def full(*, host_kv_tokens: int = 5_000, resumable: bool = True, **settings: object) -> Transcript:
    """Two runs of a batch of two, each with a token, of an engine that can offload."""
    t = Transcript(**{"hardware": HARDWARE, "batch_max": 2, "host_kv_tokens": host_kv_tokens, **settings})
    t.serve()
    runs = [pulled(name, due=3_600.0, resumable=resumable) for name in ("1", "2")]
    assert t.answer_pull(*runs, head=group("m", name="batch", waiting=50, due=3_600.0)) == ["start 1", "start 2"]
    t.at(0.1).produce(("1", 1), ("2", 1))
    t.answer_items("emit", DONE, DONE)
    return t


def head(t: Transcript, model: str, due: float) -> list[str]:
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull nothing"]
    return t.answer_pull(head=group(model, name="urgent", due=due))


def swapped_out(**settings: object) -> Transcript:
    """Run 1 is in host memory, and u has its place; the rest of the batch's group waits."""
    t = full(**settings)  # type: ignore[arg-type]
    assert head(t, "m", due=3.0) == ["offload 1"]
    assert t.offloaded("1") == ["pull m x1"]
    assert t.answer_pull(pulled("u", due=3.0), head=group("m", name="batch", due=3_600.0)) == ["start u"]
    return t


def test_kv_waits_in_host_memory_and_comes_back_before_its_group_is_pulled_again() -> None:
    t = swapped_out()
    t.produce(("u", 1))
    t.answer_items("emit", DONE)
    assert t.end(ended("u", 5)) == ["restore 1", "complete u[1:6]=STOP"]
    assert t.restored("1") == []
    assert t.produce(("1", 1)) == []  # it goes on where it was
    assert t.wake() == ["emit 1[1:2]"]
    assert (t.machine.operations.kv_offloads, t.machine.operations.kv_restores, t.machine.operations.evictions) == (1, 1, 0)


def test_the_place_is_free_when_the_kv_is_gone() -> None:
    t = full()
    assert head(t, "m", due=3.0) == ["offload 1"]
    assert t.produce(("2", 1)) == []  # not requested twice
    assert t.at(0.3).produce(("2", 1)) == ["emit 2[1:3]"]
    assert t.offloaded("1") == ["pull m x1"]


def test_what_was_made_on_the_way_out_is_delivered() -> None:
    t = full()
    head(t, "m", due=3.0)
    t.at(0.2).offloaded("1")
    assert t.produce(("1", 3)) == []
    assert t.wake() == ["emit 1[1:4]"]


def test_who_ends_on_the_way_out_is_complete() -> None:
    t = full()
    head(t, "m", due=3.0)
    assert t.end(ended("1", 2)) == ["pull m x1", "complete 1[1:3]=STOP"]
    assert t.offloaded(requested=("1",)) == []


def test_who_cannot_be_offloaded_is_evicted() -> None:
    t = full()
    assert head(t, "m", due=3.0) == ["offload 1"]
    assert t.offloaded(requested=("1",)) == ["abort 1", "pull m x1", "give back 1 evicted"]


def test_no_more_than_host_memory_holds() -> None:
    t = full(host_kv_tokens=150)
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull nothing"]
    assert t.answer_pull(head=group("m", name="urgent", waiting=2, due=3.0)) == ["abort 2", "offload 1", "pull m x1", "give back 2 evicted"]


def test_what_is_in_host_memory_already_takes_its_room() -> None:
    t = swapped_out(host_kv_tokens=150)
    t.produce(("u", 1))
    t.answer_items("emit", DONE)
    assert t.machine.eviction.choice_text("m").endswith("host memory left for 49 tokens)")
    assert head(t, "m", due=3.5)[0] == "abort 2"


def test_a_slow_bus_makes_eviction_the_better_way() -> None:
    slow = {"m": profile("m", kv_swap_us=90.0, recompute_us=100.0)}
    t = full(hardware=slow)
    assert head(t, "m", due=3.0)[0] == "abort 1"


def test_who_has_made_nothing_yet_is_not_offloaded() -> None:
    hardware = {"m": replace(profile("m"), prefill_base_ms=20.0)}  # by the figures it would be cheaper
    t = Transcript(hardware=hardware, batch_max=2, host_kv_tokens=5_000)
    t.serve()
    runs = [pulled(name, due=3_600.0, resumable=False) for name in ("1", "2")]
    t.answer_pull(*runs, head=group("m", name="batch", waiting=50, due=3_600.0))
    t.at(0.1).produce(("1", 1))
    t.answer_items("emit", DONE)
    assert head(t, "m", due=3.0)[0] == "abort 2"  # it waits, or computes its prompt; no output of it was reported


def test_it_can_be_switched_off() -> None:
    t = full(kv_swap=False)
    assert t.machine.eviction.choice_text("m") == "evict (KV swap is turned off)"
    assert head(t, "m", due=3.0)[0] == "abort 1"


def test_an_engine_that_keeps_no_kv_in_host_memory_evicts() -> None:
    t = full(host_kv_tokens=0)
    assert t.machine.eviction.choice_text("m") == "evict (no host memory for KV)"
    assert head(t, "m", due=3.0)[0] == "abort 1"


def test_who_cannot_be_continued_from_tokens_can_be_offloaded() -> None:
    assert head(full(resumable=False), "m", due=3.0) == ["offload 1"]


def test_nothing_less_urgent_is_pulled_before_it() -> None:
    t = swapped_out()
    t.produce(("u", 1))
    t.end(ended("u", 5))
    assert t.restored(requested=("1",)) == []  # the engine has no room yet
    assert t.step(ControlMessage(message=Message.WAKE)) == ["pull nothing"]
    assert t.answer_pull(head=group("m", name="batch", due=3_600.0)) == []
    assert "restore 1" in t.wake()


def test_something_more_urgent_is_pulled_before_it() -> None:
    t = swapped_out()
    t.produce(("u", 1))
    t.answer_items("emit", DONE)
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
    t.answer_pull(head=group("m", name="next", due=9.0))
    assert t.end(ended("u", 5)) == ["pull m x1", "complete u[1:6]=STOP"]


def test_beside_offloaded_runs_an_empty_engine_is_given_whatever_the_head_needs() -> None:
    t = swapped_out()
    t.produce(("u", 1))
    t.answer_items("emit", DONE)
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
    t.answer_pull(head=group("m", name="next", due=9.0))
    assert t.end(ended("u", 5)) == ["pull m x1", "complete u[1:6]=STOP"]
    assert t.pull is not None
    assert t.pull.owned_aside == 2  # run 1 in host memory, and u on its way out


def test_an_empty_engine_that_is_refused_asks_no_more_until_something_happens() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=2)
    t.serve()
    assert t.answer_pull(head=group("m", name="big", due=60.0), blocked=9_999) == []
    assert t.step(ControlMessage(message=Message.WAKE))[0].startswith("pull m")


def test_who_was_offloaded_three_times_is_left() -> None:
    t = full()
    for number in range(3):
        assert "offload 1" in head(t, "m", due=t.now_s + 3.0)
        t.offloaded("1")
        t.answer_pull(pulled(f"u{number}", due=t.now_s + 3.0), head=group("m", name="batch", due=3_600.0))
        assert "restore 1" in t.end(ended(f"u{number}", 5))
        t.restored("1")
        t.answer_items("complete", DONE)
    assert "offload 2" in head(t, "m", due=t.now_s + 3.0)


def test_nobody_makes_room_for_a_head_that_comes_after_an_offloaded_one() -> None:
    t = Transcript(hardware=HARDWARE, batch_max=2, host_kv_tokens=5_000)
    t.serve()
    small, big = pulled("small", due=33.0), pulled("big", due=60.0, prompt=1_000, output_max=8_000)
    t.answer_pull(small, big, head=group("m", name="batch", due=3_600.0))
    t.at(0.1).produce(("small", 1), ("big", 5_000))  # it may go on for 25 s
    t.answer_items("emit", DONE, DONE)
    assert head(t, "m", due=3.0) == ["offload small"]
    t.offloaded("small")
    t.answer_pull(pulled("u", due=3.0), head=group("n", name="next", due=35.0))
    t.at(1.0).loaded("n", Tier.WARM, warm=("n",), active="m")
    assert t.end(ended("u", 5))[0] == "restore small"
    t.restored(requested=("small",))
    assert t.at(12.0).step(TimePassed()) == ["restore small"]
    t.restored("small")
    assert t.machine.runs.offloading == 0


def test_who_cannot_come_back_returns_to_the_queue_in_the_end() -> None:
    t = swapped_out()
    t.produce(("u", 1))
    t.answer_items("emit", DONE)
    assert t.end(ended("u", 5))[0] == "restore 1"
    for _ in range(50):
        lines = t.restored(requested=("1",))
        if "abort 1" in lines:
            assert "give back 1 evicted" in lines
            break
        while "restore 1" not in t.wake():
            pass
    else:
        raise AssertionError("tries for ever")


def test_nobody_waits_in_host_memory_for_ever() -> None:
    t = swapped_out(offloaded_max_s=30.0)
    t.produce(("u", 1))
    t.answer_items("emit", DONE)
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
    assert t.answer_pull(head=group("n", name="busy", due=40.0)) == ["load n warm"]
    t.loaded("n", Tier.WARM, warm=("n",), active="m")
    t.at(20.0).end(ended("u", 5), ended("2", 5))
    assert t.machine.model_swap.swapping_to == "n"  # the head is more urgent
    assert t.at(21.0).loaded("n", warm=("m",)) == ["pull n x2"]
    assert t.answer_pull(pulled("x", model="n", due=40.0), head=group("n", name="busier", due=41.0)) == ["start x", "pull n x1"]
    assert t.answer_pull(pulled("y", model="n", due=41.0), head=group("n", name="busiest", due=42.0)) == ["start y"]
    assert t.at(31.0).end(ended("x", 5)) == []  # nothing more is taken
    assert "load m active" in t.end(ended("y", 5))
    assert t.loaded("m", warm=("n",)) == ["restore 1"]


# Another model --------------------------------------------------------------------------------------------------------------


def swapped_over(**settings: object) -> Transcript:
    """Both runs of m, which cannot be continued elsewhere, are in host memory, n is active and runs u; the test sets the queue next."""
    t = full(resumable=False, **settings)  # type: ignore[arg-type]
    assert head(t, "n", due=6.0)[0] == "offload 1 2"
    lines = t.offloaded("1", "2")
    if "load n active" not in lines:
        assert t.loaded("n", Tier.WARM, warm=("n",), active="m") == ["load n active"]
    assert t.loaded("n", warm=("m",)) == ["pull n x2"]
    return t


def test_who_can_be_continued_goes_back_to_the_queue_for_another_model() -> None:
    """So that the plan says where and when, and no model is loaded only for runs in host memory."""
    assert head(full(), "n", due=6.0) == ["abort 1 2", "load n active", "give back 1 2 evicted"]


def test_the_whole_batch_waits_while_another_model_is_active() -> None:
    t = swapped_over()
    t.answer_pull(pulled("u", model="n", due=6.0), head=group("m", name="batch", due=3_600.0))
    t.produce(("u", 1))
    t.answer_items("emit", DONE)
    assert t.end(ended("u", 5)) == ["load m active", "complete u[1:6]=STOP"]
    assert t.loaded("m", warm=("n",)) == ["restore 1 2"]


@pytest.mark.parametrize(("apart", "left"), [(True, "5,000"), (False, "4,798")])
def test_what_another_model_has_in_host_memory_takes_no_room_where_each_has_its_own(apart: bool, left: str) -> None:
    t = swapped_over(host_kv_apart=apart)
    assert t.machine.eviction.choice_text("n").endswith(f"host memory left for {left} tokens)")


def test_it_swaps_back_when_the_queue_is_empty() -> None:
    t = swapped_over()
    t.answer_pull(pulled("u", model="n", due=6.0))
    t.produce(("u", 1))
    assert "load m active" in t.end(ended("u", 5))


def test_it_swaps_back_for_who_is_more_urgent_than_the_head() -> None:
    t = swapped_over()
    t.answer_pull(pulled("u", model="n", due=6.0), head=group("n", name="later", due=7_200.0))
    t.produce(("u", 1))
    assert "load m active" in t.end(ended("u", 5))


def test_a_model_that_cannot_be_active_again_holds_up_nobody() -> None:
    """Its runs have failed then."""
    t = swapped_over()
    t.answer_pull(pulled("u", model="n", due=6.0), head=group("n", name="later", due=7_200.0))
    t.produce(("u", 1))
    t.answer_items("emit", DONE)
    assert "load m active" in t.end(ended("u", 5))
    failed = ModelNotLoaded(model="m", tier=Tier.ACTIVE, message="broken", active="n", warm=())
    assert t.step(failed) == ["abort 1 2", "pull n x2", "give back 1 2 failed"]


def test_it_stays_for_a_head_that_is_more_urgent() -> None:
    t = swapped_over()
    t.answer_pull(pulled("u", model="n", due=6.0), head=group("n", name="more", due=60.0))
    assert t.step(ControlMessage(message=Message.WAKE)) == []
    assert t.machine.model_swap.swapping_to == ""


# Leaving --------------------------------------------------------------------------------------------------------------------


def test_a_lost_lease_returns_it_with_its_progress() -> None:
    t = swapped_out()
    assert t.at(100.0).step(LeaseLoss(incarnation="a/1"))[0] == "abort 1 2 u"
    assert t.machine.runs.get("1/1").cause == "drained"  # type: ignore[union-attr]


def test_a_cancelled_one_is_dropped() -> None:
    t = swapped_out()
    assert t.step(ControlMessage(message=Message.CANCEL, run_id="1/1")) == ["abort 1", "forget 1 not owned"]
    assert not t.machine.runs.offloaded()


def test_a_drain_returns_it_at_once() -> None:
    t = swapped_out()
    lines = t.step(DrainCommand(finish_s=30.0, stop=False))
    assert lines == ["abort 1", "describe", "give back 1 drained"]


def test_a_drain_finishes_here_who_cannot_be_continued_elsewhere() -> None:
    t = swapped_over()
    t.answer_pull(pulled("u", model="n", due=6.0))
    t.produce(("u", 1))
    t.answer_items("emit", DONE)
    assert t.step(DrainCommand(finish_s=30.0, stop=True)) == ["describe"]
    assert "load m active" in t.end(ended("u", 5))
    assert t.loaded("m") == ["restore 1 2"]
    t.restored("1", "2")
    assert t.end(ended("1", 5)) == []  # after the end of u is written
    t.at(t.now_s + 30.0).step(TimePassed())
    assert t.machine.runs.get("2/1").cause == "drained"  # type: ignore[union-attr]
