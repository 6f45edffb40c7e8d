"""The same workload under several policies, live and in virtual time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from qlm.api.v1.request_pb2 import Request, SamplingParams
from qlm_agent.config import AgentConfig, machine_settings, served_models
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_load.__main__ import main
from qlm_load.compare import simulations
from qlm_load.compare.comparison import NAMES, PolicyRun, comparison_rows, print_comparison, print_policies
from qlm_load.compare.simulations import FailedRun, simulated_runs
from qlm_load.demo.settings import demo_config_path
from qlm_load.workload.output_bounds import OUTPUT_BOUNDS
from qlm_planner.policy import Order, Policy
from qlm_process.config import load_config
from qlm_sim import SimRequest
from qlm_sim.cluster import Cluster
from qlm_sim.from_config import describe
from qlm_sim.requests import message

pytestmark = pytest.mark.xdist_group("comparison")  # one worker, which simulates each run once

SMALL = ("--requests", "60", "--seed", "2")


def run(policy: str, **fields: object) -> PolicyRun:
    values: dict[str, object] = {
        "simulated": True, "requests": 10, "ended": 10, "attainment": {"interactive": 0.5, "batch-1": 1.0}, "wait_p50_s": 1.0,
        "wait_p99_s": 2_000.0, "run_s": 90.0, "swaps": 7,
    }  # fmt: skip
    return PolicyRun(policy=policy, **{**values, **fields})  # type: ignore[arg-type]


@cache
def simulated(*arguments: str) -> PolicyRun:
    result = CliRunner().invoke(main, ["simulate", *SMALL, *arguments])
    assert result.exit_code == 0, result.output
    return PolicyRun(**json.loads(result.output))


def test_the_table_says_what_is_simulated() -> None:
    rows = comparison_rows([run("slo", simulated=False), run("slo"), run("fcfs", ended=9)])
    assert rows[0] == ["", "QLM live", "QLM simulated", "FCFS simulated"]
    assert ["attained, interactive", "50.0%", "50.0%", "50.0%"] in rows
    assert ["waiting p99", "2,000.0 s", "2,000.0 s", "2,000.0 s"] in rows
    assert ["all ended after", "90 s", "90 s", "9 ended"] in rows
    console = Console(file=StringIO(), width=120)
    with console.capture() as capture:
        print_comparison(console, [run("slo")])
    assert "simulated: the same machines in virtual time" in capture.get()


def test_policies_stand_side_by_side_and_every_one_has_a_name() -> None:
    assert set(NAMES) == {order.value for order in Order}
    result = CliRunner().invoke(main, ["compare", "--policy", "edf", "--policy", "least_loaded", "--policy", "sal", "--json", *SMALL])
    assert result.exit_code == 0, result.output
    runs = [PolicyRun(**each) for each in json.loads(result.output)]
    assert [each.policy for each in runs] == ["edf", "least_loaded", "sal"]
    assert all(each.ended == each.requests == 60 for each in runs)
    console = Console(file=StringIO(), width=160)
    with console.capture() as capture:
        print_policies(console, runs)
    assert "least loaded" in capture.get()


def test_a_simulated_run_ends_every_request() -> None:
    first = simulated()
    assert (first.policy, first.simulated, first.requests, first.ended) == ("slo", True, 60, 60)
    assert set(first.attainment) == {"interactive", "batch-1", "batch-2"}
    assert 0.0 < first.wait_p50_s <= first.wait_p99_s <= first.run_s


def test_simulated_agents_are_set_as_live_ones() -> None:
    path = demo_config_path()
    overrides = {"agent.kv_swap": False, "agent.displacements_max": 2, "agent.warm_ahead": False, "agent.simulated.host_memory_gb": 20.0}
    agents = ("a100-0", "h100-0")
    cluster = Cluster(describe(path, agents, overrides), 1, Policy())
    for agent in cluster.agents:
        config = load_config(AgentConfig, path, "agents", agent.process.name, overrides)
        assert agent.settings == machine_settings(config.agent, served_models(config, shipped_snapshot()))


def test_swaps_are_counted_over_all_lives_of_an_agent() -> None:
    """A new life's count begins anew; the first model of a life replaces none."""
    cluster = Cluster(describe(demo_config_path(), ("a100-0",), {}), 1, Policy())
    agent = cluster.agents[0]
    try:
        for made_active, swaps in ((3, 2), (0, 2), (4, 5)):
            agent.machine.model_swap.swaps = made_active
            assert agent.swaps == swaps
            agent.process.end()
            agent.start()
            assert agent.machine.model_swap.swaps == 0
            assert agent.swaps == swaps
    finally:
        cluster.stop()


def test_simulated_clients_say_what_live_ones_say_and_a_run_is_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `qlm_load.replay.replay` does: a round bound well above the answer, and that it is greedy. Expected lengths rest on both."""
    sent: list[SamplingParams] = []

    def sending(request: SimRequest, spec: ModelSpec) -> Request:
        made = message(request, spec)
        assert made.sampling.max_tokens in OUTPUT_BOUNDS
        assert made.sampling.max_tokens > request.output_tokens
        sent.append(made.sampling)
        return made

    monkeypatch.setattr("qlm_sim.comparison.message", sending)
    first = simulated.__wrapped__()
    assert len(sent) == 60
    assert all(each.HasField("temperature") and each.temperature == 0.0 and not each.HasField("seed") for each in sent)
    assert simulated() == first


def test_a_killed_agent_delays_what_it_would_have_served() -> None:
    killed = simulated("--kill", "a100-0@0.5+30", "--kill", "h100-0@0.5+30")
    assert killed.ended == 60
    assert killed.run_s > 30.0 > simulated().run_s / 2.0
    assert killed.wait_p99_s > simulated().wait_p99_s


def test_a_standby_takes_over_from_the_planner_that_leads() -> None:
    """With one planner, requests wait until it is started again."""
    alone = simulated("--kill", "planner@0.5+30", "--set", "planners=[{name: planner-0}]")
    two = simulated("--kill", "planner@0.5+30")
    assert alone.run_s > 30.0 * 2.0 > two.run_s
    assert (alone.ended, two.ended) == (60, 60)


@pytest.mark.parametrize(
    ("kill", "complaint"), [("nobody@1+1", "called 'nobody'"), ("a100-0", "NAME@AT+DOWN"), ("a@1+inf", "NAME@AT+DOWN")]
)
def test_a_wrong_kill_is_refused(kill: str, complaint: str) -> None:
    result = CliRunner().invoke(main, ["simulate", *SMALL, "--kill", kill])
    assert result.exit_code == 2
    assert complaint in result.output


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Another program in place of Python, for the processes of the simulated runs."""

    def put(text: str) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return put


async def test_runs_are_processes_whose_end_is_awaited(instead: Callable[[str], None]) -> None:
    document = json.dumps(asdict(run("fcfs")))
    instead(f"echo '{document}'")
    assert await simulated_runs(("fcfs",), (), 30.0) == (PolicyRun(**json.loads(document)),)


async def test_one_that_fails_or_takes_too_long_says_so(instead: Callable[[str], None]) -> None:
    assert simulations.ERROR_BYTES_MAX > 20
    instead("echo broken >&2; exit 1")
    assert await simulated_runs(("slo",), (), 30.0) == (FailedRun(why="the simulated run of slo failed: broken", failed=True),)
    instead("exec sleep 60")
    (late,) = await simulated_runs(("slo",), (), 0.2)
    assert isinstance(late, FailedRun)
    assert not late.failed
    assert "ended after 0.2 s" in late.why
