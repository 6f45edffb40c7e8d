"""Registering, losing the lease, draining, stopping."""

from __future__ import annotations

from qlm_agent.decisions.events import AgentStart, ControlMessage, DrainCommand, LeaseLoss, Message, Outcome, RegisterAnswer, TimePassed
from qlm_agent.decisions.machine import Life

from .transcript import Transcript, ended, pulled

DONE, STALE = Outcome.DONE, Outcome.STALE


def running(*names: str) -> Transcript:
    """Runs on the engine; those whose name begins with "t" have three tokens, of which one is stored."""
    t = Transcript(give_up_s=10.0)
    t.serve()
    t.answer_pull(*(pulled(name) for name in names))
    for name in names:
        if name.startswith("t"):
            t.produce((name, 1))
            t.answer_items("emit", DONE)
            t.produce((name, 2))
    return t


def test_registers_again_after_a_lost_answer() -> None:
    t = Transcript()
    assert t.step(AgentStart()) == ["register"]
    assert t.lose("register") == []
    assert t.wake() == ["register"]
    assert t.register() == ["pull nothing"]


def test_a_lost_lease_ends_the_incarnation_in_order() -> None:
    t = running("t1", "t2", "u3")
    t.end(ended("t2", 1))  # its end is being written
    assert t.at(100.0).step(LeaseLoss(incarnation="a/1")) == ["abort t1 u3", "emit t1[1:3]", "give back u3 unstarted"]
    assert t.step(ControlMessage(message=Message.WAKE)) == []  # pulls no more
    assert t.answer_items("give back", DONE) == ["forget u3 given_back"]
    assert t.answer_items("complete", DONE) == ["forget t2 written"]
    assert t.answer_items("emit", DONE) == ["give back t1 drained"]
    assert t.answer_items("give back", DONE) == ["forget t1 given_back", "register"]
    assert t.step(RegisterAnswer(call=t.calls.pop("register"), incarnation="a/2")) == ["pull m x100"]
    assert t.machine.incarnation == "a/2"


def test_a_zombie_finds_that_nothing_is_its_own() -> None:
    t = running("t1", "t2")
    t.at(100.0).step(LeaseLoss(incarnation="a/1"))
    assert t.answer_items("emit", STALE, STALE) == ["forget t1 not owned", "forget t2 not owned", "register"]


def test_requests_pulled_while_the_lease_is_lost_are_given_back() -> None:
    t = Transcript()
    t.serve()
    assert t.at(100.0).step(LeaseLoss(incarnation="a/1")) == []  # waits for the pull
    assert t.answer_pull(pulled("1")) == ["give back 1 unstarted"]
    assert t.answer_items("give back", DONE) == ["forget 1 given_back", "register"]


def test_a_pull_that_was_refused_with_the_lease_is_looked_up() -> None:
    t = Transcript()
    t.serve()
    t.at(100.0).lose("pull")
    t.step(LeaseLoss(incarnation="a/1"))
    assert t.wake() == ["read owned"]
    assert t.answer_owned() == ["register"]


def test_a_name_that_is_taken_at_once_again_is_not_fought_for() -> None:
    t = running()
    assert t.at(2.0).step(LeaseLoss(incarnation="a/1")) == []
    assert t.wake() == ["register"]
    assert t.now_s == 3.0


def test_the_loss_of_an_older_lease_is_old_news() -> None:
    t = running("t1")
    assert t.step(LeaseLoss(incarnation="a/0")) == []
    assert t.machine.life is Life.SERVING


def test_drain_lets_runs_finish() -> None:
    t = running("t1", "u2")
    assert t.at(1.0).step(DrainCommand(finish_s=30.0, stop=False, caller=7))[0] == "describe"
    assert t.answer("describe") == []
    assert t.step(ControlMessage(message=Message.WAKE)) == []
    t.answer_items("emit", DONE)
    assert t.end(ended("t1", 1), ended("u2", 1)) == ["complete t1[3:4]=STOP u2[0:1]=STOP"]
    assert t.answer_items("complete", DONE, DONE) == ["forget t1 written", "forget u2 written", "drained 2 finished 0 given back"]
    assert t.machine.life is Life.SERVING  # drained, not stopped


def test_drain_gives_the_rest_back_when_its_time_is_up() -> None:
    t = running("t1", "u2")
    t.at(1.0).step(DrainCommand(finish_s=2.0, stop=False, caller=7))
    t.answer("describe")
    t.answer_items("emit", DONE)
    assert t.wake() == ["abort t1 u2", "give back t1 drained"]
    assert t.now_s == 3.0
    assert t.answer_items("give back", DONE) == ["forget t1 given_back", "give back u2 unstarted"]
    assert t.answer_items("give back", DONE) == ["forget u2 given_back", "drained 0 finished 2 given back"]


def test_sigterm_drains_and_stops() -> None:
    t = running("t1")
    t.at(1.0).step(DrainCommand(finish_s=0.0, stop=True))
    assert t.answer_items("emit", DONE) == ["give back t1 drained"]
    assert t.answer("describe") == []
    assert t.answer_items("give back", DONE) == ["forget t1 given_back", "deregister"]
    assert t.answer("deregister") == ["stop"]
    assert t.step(TimePassed()) == []
    assert t.machine.next_wakeup_s is None


def test_sigterm_before_registration_stops_at_once() -> None:
    t = Transcript()
    t.step(AgentStart())
    t.lose("register")
    assert t.step(DrainCommand(finish_s=30.0, stop=True)) == ["stop"]


def test_sigterm_after_a_drain_stops() -> None:
    t = running()
    t.step(DrainCommand(finish_s=30.0, stop=False, caller=1))
    t.answer("describe")
    assert t.step(DrainCommand(finish_s=30.0, stop=True)) == ["deregister"]
    assert t.lose("deregister") == ["stop"]  # the lease ends by itself


def test_a_stop_does_not_wait_for_ever_for_the_server() -> None:
    t = running("t1")
    t.at(1.0).step(DrainCommand(finish_s=5.0, stop=True))
    t.lose("describe")
    t.lose("emit")
    for _ in range(100):
        lines = t.wake()
        if lines == ["stop"]:
            break
        for call in list(t.calls):
            t.lose(call)
    assert t.machine.life is Life.STOPPED
    assert t.now_s == 1.0 + 5.0 + 10.0


def test_what_arrives_during_a_drain_goes_back() -> None:
    t = Transcript()
    t.serve()
    assert t.step(DrainCommand(finish_s=30.0, stop=False, caller=1)) == ["describe"]
    t.answer("describe")
    assert t.answer_pull(pulled("1"), head="m") == ["give back 1 unstarted"]
    assert t.answer_items("give back", DONE) == ["forget 1 given_back", "drained 0 finished 1 given back"]


def test_a_drain_message_drains() -> None:
    t = running()
    assert t.step(ControlMessage(message=Message.DRAIN)) == ["describe"]


def test_a_stop_while_it_registers_gives_the_lease_back() -> None:
    t = Transcript()
    assert t.step(AgentStart()) == ["register"]
    assert t.step(DrainCommand(finish_s=5.0, stop=True)) == []
    assert t.register() == ["describe", "deregister"]
    t.answer("describe")
    assert t.answer("deregister") == ["stop"]


def test_a_stop_whose_registration_is_lost_ends_at_once() -> None:
    t = Transcript()
    t.step(AgentStart())
    t.step(DrainCommand(finish_s=5.0, stop=True))
    assert t.lose("register") == ["stop"]
