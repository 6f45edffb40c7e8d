"""Choice of the active model (QLM section 5, model swapping)."""

from __future__ import annotations

from qlm_agent.decisions.events import ControlMessage, LoadCommand, Message, ModelNotLoaded, Outcome, ProfilesUpdated
from qlm_agent.engines.port import Tier

from .transcript import HARDWARE, Transcript, ended, profile, pulled

DONE = Outcome.DONE


def busy() -> Transcript:
    """One run of m on the engine, and the head of the queue is of n."""
    t = Transcript()
    t.serve()
    assert t.answer_pull(pulled("1"), head="n") == ["start 1", "load n warm"]
    return t


def test_next_model_is_warmed_and_becomes_active_when_the_batch_is_done() -> None:
    t = busy()
    assert t.loaded("n", Tier.WARM, active="m", warm=("n",)) == []  # nothing more of the old model
    assert t.end(ended("1", 3)) == ["load n active", "complete 1[0:3]=STOP"]
    assert t.machine.model_swap.swapping_to == "n"
    assert t.machine.batch_reported == 0, "the batch of m says nothing of n"
    assert t.step(ControlMessage(message=Message.WAKE)) == []  # no pull during the swap
    assert t.loaded("n", warm=("m",)) == ["pull n x100"]
    assert t.machine.batch_reported == 256


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
    assert t.end(ended("1", 3)) == ["load n active", "complete 1[0:3]=STOP"]


def test_head_comes_back_to_the_active_model() -> None:
    t = busy()
    t.loaded("n", Tier.WARM, active="m", warm=("n",))
    assert t.step(ControlMessage(message=Message.HEAD_CHANGED)) == ["pull m x100"]
    assert t.answer_pull(pulled("2"), head="n") == ["start 2"]


def test_a_model_that_cannot_be_warm_is_still_made_active() -> None:
    t = busy()
    failed = ModelNotLoaded(model="n", tier=Tier.WARM, message="no room", active="m", warm=())
    assert t.step(failed) == []
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
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
    t.loaded("m")
    assert t.answer_pull(head="x") == []


def test_models_are_moved_on_request() -> None:
    t = Transcript("m", "n", "o")
    t.serve()
    t.answer_pull()
    assert t.step(LoadCommand(caller=1, model="n", tier=Tier.WARM)) == ["load n warm"]
    assert t.step(LoadCommand(caller=2, model="n", tier=Tier.WARM)) == []
    assert t.step(LoadCommand(caller=3, model="o", tier=Tier.WARM)) == ["answer 3 MODEL_BUSY"]  # one transfer at a time
    answered = t.loaded("n", Tier.WARM, active="m", warm=("n",))
    assert answered[:2] == ["answer 1 done", "answer 2 done"]
    assert t.step(LoadCommand(caller=4, model="n", tier=Tier.WARM)) == ["answer 4 done"]
    assert t.step(LoadCommand(caller=5, model="m", tier=Tier.WARM)) == ["answer 5 done"]
    assert t.step(LoadCommand(caller=6, model="m", tier=Tier.COLD)) == ["answer 6 MODEL_BUSY"]  # active
    assert t.step(LoadCommand(caller=7, model="x", tier=Tier.COLD)) == ["answer 7 UNKNOWN_MODEL"]
    assert t.step(LoadCommand(caller=8, model="n", tier=Tier.COLD)) == ["load n cold"]
    assert t.loaded("n", Tier.COLD, active="m", warm=())[:1] == ["answer 8 done"]


# Three tiers ----------------------------------------------------------------------------------------------------------------


def ahead(*models: str, host_memory_gb: float, sizes: dict[str, float] | None = None) -> Transcript:
    """m runs; the head is of m too, and behind it are these models. Each has 10 GB of weights where nothing else is said."""
    hardware = {name: profile(name, weights_gb=(sizes or {}).get(name, 10.0)) for name in "mnop"}
    t = Transcript("m", "n", "o", "p", hardware=hardware, host_memory_gb=host_memory_gb, batch_max=1)
    t.serve()
    t.answer_pull(pulled("1"), head="m", ahead=models)
    return t


def behind(t: Transcript, *models: str, head: str = "m") -> list[str]:
    """The order of the queue is now this."""
    t.step(ControlMessage(message=Message.HEAD_CHANGED))
    return t.answer_pull(head=head, ahead=models)


def test_models_ahead_are_warmed_beside_the_batch_in_their_order() -> None:
    t = ahead("n", "o", host_memory_gb=40.0)
    assert behind(t, "n", "o") == []  # under way already
    assert t.loaded("n", Tier.WARM, active="m", warm=("n",)) == ["load o warm"]
    assert t.loaded("o", Tier.WARM, active="m", warm=("n", "o")) == []
    assert t.machine.operations.warmings == 2


def test_no_more_are_warmed_than_host_memory_holds_beside_the_active_one() -> None:
    t = ahead("n", "o", host_memory_gb=25.0)
    assert t.loaded("n", Tier.WARM, active="m", warm=("n",)) == []


def test_a_smaller_one_that_still_fits_is_warmed() -> None:
    t = ahead("n", "o", "p", host_memory_gb=25.0, sizes={"p": 4.0})
    assert t.loaded("n", Tier.WARM, active="m", warm=("n",)) == ["load p warm"]


def test_the_model_that_comes_last_becomes_cold_for_one_that_comes_sooner() -> None:
    t = ahead("n", "o", host_memory_gb=30.0)
    t.loaded("n", Tier.WARM, active="m", warm=("n",))
    assert t.loaded("o", Tier.WARM, active="m", warm=("n", "o")) == []
    assert behind(t, "p", "n", "o") == ["load o cold"]
    assert t.loaded("o", Tier.COLD, active="m", warm=("n",)) == ["load p warm"]
    assert t.loaded("p", Tier.WARM, active="m", warm=("n", "p")) == []


def test_one_that_nobody_waits_for_goes_first() -> None:
    t = ahead("n", "o", host_memory_gb=30.0)
    t.loaded("n", Tier.WARM, active="m", warm=("n",))
    t.loaded("o", Tier.WARM, active="m", warm=("n", "o"))
    assert behind(t, "o", "p") == ["load n cold"]


def test_none_that_comes_sooner_becomes_cold() -> None:
    t = ahead("n", "o", host_memory_gb=30.0)
    t.loaded("n", Tier.WARM, active="m", warm=("n",))
    t.loaded("o", Tier.WARM, active="m", warm=("n", "o"))
    assert behind(t, "n", "o", "p") == []


def test_the_next_model_takes_the_place_of_the_active_ones_copy() -> None:
    t = ahead(host_memory_gb=12.0)
    assert behind(t, head="n") == ["load n warm"]  # it fits only without that


def test_a_warm_head_need_not_wait_for_another_model_that_is_being_warmed() -> None:
    t = ahead("n", "o", host_memory_gb=40.0)
    assert t.loaded("n", Tier.WARM, active="m", warm=("n",)) == ["load o warm"]
    assert behind(t, head="n") == []
    assert t.end(ended("1", 1)) == ["load n active", "complete 1[0:1]=STOP"]
    assert t.loaded("o", Tier.WARM, active="", warm=("m", "n", "o")) == []
    assert t.machine.model_swap.swapping_to == "n"
    assert t.loaded("n", warm=("m", "o"))[0] == "pull n x1"


def test_weights_that_arrive_later_count() -> None:
    t = Transcript("m", "n", "o", host_memory_gb=40.0, batch_max=1)
    t.serve()
    t.answer_pull(pulled("1"), head="m", ahead=("n", "o"))
    assert t.step(ProfilesUpdated(hardware={name: profile(name) for name in "mno"})) == ["load n warm"]


def test_weights_that_the_engine_counts_itself_go_before_those_of_profiles() -> None:
    """Else what the machine takes to fit pushes out the model before it, which is warmed again, for ever."""
    t = Transcript("m", "n", "o", hardware=HARDWARE, weights_gb=dict.fromkeys("mno", 15.0), host_memory_gb=40.0, batch_max=1)
    t.serve()
    assert t.answer_pull(pulled("1"), head="m", ahead=("n", "o")) == ["start 1", "load n warm"]
    assert t.loaded("n", Tier.WARM, active="m", warm=("n",)) == []
    assert t.step(ProfilesUpdated(hardware={name: profile(name) for name in "mno"})) == []


def test_warming_ahead_can_be_switched_off() -> None:
    t = Transcript("m", "n", "o", hardware=HARDWARE, warm_ahead=False, batch_max=1)
    t.serve()
    assert t.answer_pull(pulled("1"), head="m", ahead=("n", "o")) == ["start 1"]


def test_a_model_that_could_not_be_warmed_is_tried_again_after_a_while() -> None:
    t = ahead("n", host_memory_gb=40.0)
    assert t.step(ModelNotLoaded(model="n", tier=Tier.WARM, message="no room", active="m", warm=())) == []
    assert behind(t, "n") == []
    assert t.at(40.0).step(ControlMessage(message=Message.HEAD_CHANGED)) == ["load n warm", "pull nothing"]


def test_what_turns_out_to_be_owned_during_a_swap_goes_back() -> None:
    t = Transcript(owned_check_s=15.0)
    t.serve()
    t.answer_pull(pulled("1"), head="n")
    t.loaded("n", Tier.WARM, active="m", warm=("n",))
    assert t.end(ended("1", 1))[0] == "load n active"
    t.answer_items("complete", DONE)
    assert t.wake() == ["read owned"]
    assert t.answer_owned(pulled("9")) == ["give back 9 unstarted"]


def test_the_only_model_is_loaded_before_a_request_wants_it() -> None:
    t = Transcript("m")
    assert t.register() == ["load m active"]
    assert t.loaded("m") == ["pull m x100"]
    t = Transcript("m", "n")
    t.register()
    assert t.answer_pull() == [], "of several it waits for the plan"
