"""The kill plan: by seed, inside the middle third, only while a victim holds enough."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from qlm_load.campaign.chaos import LATEST_START, WINDOW, Chaos, Plan, Role, RunSample, plan_kills

PIDS = {"a100-0": 11, "h100-0": 12, "planner": 13, "gateway-0": 14, "gateway-1": 15}


def plans(from_share: float = 0.4) -> tuple[Plan, ...]:
    names = {Role.AGENT: ("a100-0", "h100-0"), Role.PLANNER: ("planner",), Role.GATEWAY: ("gateway-1", "gateway-0")}
    return tuple(Plan(role=role, candidates=name, from_share=from_share) for role, name in names.items())


def chaos_of(killed: list[int]) -> Chaos:
    return Chaos(plans(), held_min=50, seed=3, start_s=1000.0, kill=killed.append)


def test_victims_are_one_of_each_role_by_seed() -> None:
    arguments = (["h100-0", "a100-0"], ["planner"], ["gateway-0", "gateway-1"])
    assert plan_kills(7, *arguments) == plan_kills(7, *arguments)
    seeds = [plan_kills(seed, *arguments) for seed in range(40)]
    assert {planned[0].candidates for planned in seeds} == {("a100-0", "h100-0"), ("h100-0", "a100-0")}
    assert {planned[2].candidates[0] for planned in seeds} == {"gateway-0", "gateway-1"}
    for planned in seeds:
        assert [each.role for each in planned] == [Role.AGENT, Role.PLANNER, Role.GATEWAY]
        assert all(WINDOW[0] <= each.from_share <= LATEST_START for each in planned)


def test_kills_each_once_when_it_holds_enough() -> None:
    killed: list[int] = []
    chaos = chaos_of(killed)
    assert chaos.poll(RunSample(now_s=1010.0, ended_share=0.39, held={"a100-0": 99, "planner": 99, "gateway-1": 99}), PIDS) == []
    first = chaos.poll(RunSample(now_s=1011.0, ended_share=0.40, held={"a100-0": 50, "planner": 49, "gateway-1": 0, "h100-0": 80}), PIDS)
    assert killed == [11]
    assert (first[0].held, first[0].at_s, first[0].pid, first[0].seed) == (50, 11.0, 11, 3)
    chaos.poll(RunSample(now_s=1012.0, ended_share=0.41, held={"a100-0": 60, "planner": 400, "gateway-1": 51}), PIDS)
    chaos.poll(RunSample(now_s=1013.0, ended_share=0.50, held={"a100-0": 60, "planner": 400, "gateway-1": 51}), PIDS)
    assert killed == [11, 13, 15]
    assert chaos.spared == ()
    assert chaos.next_from_share > 1


def test_the_planner_that_leads_is_killed_and_no_standby() -> None:
    killed: list[int] = []
    plan = Plan(role=Role.PLANNER, candidates=("planner-1", "planner-0"), from_share=0.4)
    chaos = Chaos([plan], held_min=50, seed=3, start_s=1000.0, kill=killed.append)
    chaos.poll(RunSample(now_s=1001.0, ended_share=0.41, held={"planner-0": 80}), {"planner-0": 1, "planner-1": 2})
    assert killed == [1]


def test_spares_who_never_held_enough_in_the_window() -> None:
    killed: list[int] = []
    chaos = chaos_of(killed)
    chaos.poll(RunSample(now_s=1001.0, ended_share=0.5, held={"a100-0": 49, "planner": 49}), PIDS)
    chaos.poll(RunSample(now_s=1002.0, ended_share=WINDOW[1] + 0.01, held={"a100-0": 90, "planner": 90, "gateway-1": 90}), PIDS)
    assert killed == []
    assert len(chaos.spared) == 3


def test_another_of_the_role_takes_the_place_of_one_that_holds_too_little() -> None:
    killed: list[int] = []
    chaos = chaos_of(killed)
    held = {"a100-0": 3, "h100-0": 90, "gateway-0": 90, "gateway-1": 80}
    chaos.poll(RunSample(now_s=1001.0, ended_share=0.52, held=held), PIDS)
    assert killed == [15]
    chaos.poll(RunSample(now_s=1002.0, ended_share=0.54, held=held), PIDS)
    assert killed == [15, 12]
    assert [(entry.role, entry.process) for entry in chaos.log] == [(Role.GATEWAY, "gateway-1"), (Role.AGENT, "h100-0")]


def test_does_not_kill_who_is_down_already() -> None:
    killed: list[int] = []
    chaos_of(killed).poll(RunSample(now_s=1001.0, ended_share=0.5, held={"a100-0": 90}), {"planner": 13})
    assert killed == []


def test_notices_the_restart() -> None:
    chaos = chaos_of([])
    entry = chaos.poll(RunSample(now_s=1001.0, ended_share=0.5, held={"a100-0": 90}), PIDS)[0]
    chaos.poll(RunSample(now_s=1002.0, ended_share=0.5, held={}), PIDS)
    chaos.poll(RunSample(now_s=1002.5, ended_share=0.5, held={}), {"planner": 13})
    assert not entry.restarted_s
    chaos.poll(RunSample(now_s=1003.0, ended_share=0.5, held={}), {**PIDS, "a100-0": 77})
    chaos.poll(RunSample(now_s=1004.0, ended_share=0.5, held={}), {**PIDS, "a100-0": 78})
    assert entry.new_pid == 77
    assert entry.restarted_s == pytest.approx(2.0)


def test_sends_sigkill_to_a_real_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim:
        chaos = Chaos(plans(), held_min=1, seed=1, start_s=0.0)
        chaos.poll(RunSample(now_s=1.0, ended_share=0.5, held={"planner": 1}), {"planner": victim.pid})
        assert victim.wait(timeout=30) == -signal.SIGKILL
