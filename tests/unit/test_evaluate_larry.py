"""The evaluation of LARRY and SAL, on few requests: it serves everything, and its claims are read off the runs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from benchmarks.evaluate.command import evaluate
from benchmarks.evaluate.larry import ENGINES, WEIGHTS, Evaluation, paper_servers, sustained_per_s
from benchmarks.evaluate.replicas import Balancer, Replicas, bursty_requests, serve
from click.testing import CliRunner

from qlm_agent.engines.policies.memory import Larry
from qlm_agent.engines.policies.registry import ENGINE_POLICIES, FirstComeFirstServed

LENGTHS = [(374, 44), (396, 109), (879, 55), (91, 16), (2734, 129), (4142, 424), (50, 600), (1020, 210)]
PROFILE = paper_servers()["8b"]


def test_servers_are_those_of_the_paper() -> None:
    small, large = paper_servers().values()
    assert small.kv_capacity_tokens == 158_849
    assert large.kv_capacity_tokens == pytest.approx(240_000, rel=0.02), "(2 x 74.5 - 70.6) GB of 328 KB a token"
    assert small.decode_step_s(1.0, 500.0) == pytest.approx(0.0144, rel=0.02), "2,048 tokens in 30 s (LLM-Inference-Bench)"


def test_bursts_vary_as_stated() -> None:
    """Variance over mean of counts in bins of 10 s: 4."""
    requests = bursty_requests(LENGTHS, 40_000, 5.0, seed=3)
    counts = np.bincount((requests.arrived_s // 10).astype(int))[:-1]
    assert counts.mean() == pytest.approx(50.0, rel=0.05)
    assert counts.var() / counts.mean() == pytest.approx(4.0, rel=0.15)
    assert (requests.prompts[:8] == np.roll([row[0] for row in LENGTHS], -LENGTHS.index((requests.prompts[0], requests.outputs[0])))).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_policy_serves_all_requests(engine: str) -> None:
    requests = bursty_requests(LENGTHS, 60, 20.0, seed=1)
    outcome = serve(requests, PROFILE, servers=1, policy=ENGINE_POLICIES[engine], seed=1)
    assert (outcome.first_s > requests.arrived_s).all()
    assert (outcome.end_s[requests.outputs > 1] > outcome.first_s[requests.outputs > 1]).all()


@pytest.mark.parametrize("balancer", Balancer.NAMES)
def test_each_balancer_uses_all_servers_and_the_same_seed_repeats(balancer: str) -> None:
    requests = bursty_requests(LENGTHS, 120, 20.0, seed=1)
    outcomes = [serve(requests, PROFILE, servers=3, policy=Larry, balancer=balancer, seed=1).figures() for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    alone = serve(requests, PROFILE, servers=1, policy=Larry, seed=1).figures()
    assert outcomes[0]["first_s_p95"] < alone["first_s_p95"]


def test_a_balancer_sees_reports_and_its_own_requests_only() -> None:
    """Between two polls nothing ends; at the next one the prompts are computed."""
    replicas = Replicas(PROFILE, 2, FirstComeFirstServed, seed=1)
    balancer = Balancer("sal", replicas, seed=1)
    assert [balancer.choose(number, 0.01, 1_000) for number in range(4)] == [0, 1, 0, 1]
    assert balancer.choose(4, 0.09, 100) == 0
    assert balancer.choose(5, 0.11, 100) == 0, "no request was really sent, so the poll shows idle servers"


def test_a_server_sustains_more_of_short_requests() -> None:
    assert sustained_per_s([(100, 20)], PROFILE) > 5 * sustained_per_s([(4_000, 200)], PROFILE)


def test_claims_are_read_off_the_runs() -> None:
    evaluation = Evaluation(name="x", profile=PROFILE, lengths=LENGTHS, seeds=(1, 2), duration_s=3.0)
    rows = {row.name.removeprefix("x "): row for row in evaluation.measure()}
    assert len(rows) == 3 + 2 * (6 + 2 + len(Balancer.NAMES)) + 1 + 2 + 2 * len(WEIGHTS)
    first = rows["LARRY: p50 first token"]
    rivals = [f"1 {engine}" for engine in ENGINES if engine != "larry"]
    least = min(rivals, key=lambda name: sum(figures["first_s_p50"] for figures in evaluation.runs[name]))
    mine, its = ([figures["first_s_p50"] for figures in evaluation.runs[name]] for name in ("1 larry", least))
    assert first.ours == pytest.approx([one / other for one, other in zip(mine, its, strict=True)])
    assert least in first.note
    evaluation.runs["1 larry"] = [{key: 2 * value for key, value in figures.items()} for figures in evaluation.runs[least]]
    assert next(row for row in evaluation.rows() if row.name == "x LARRY: p50 first token").ratio == pytest.approx(2.0)


def test_the_command_needs_the_trace_and_knows_its_parts(tmp_path: Path) -> None:
    arguments = ["--paper", "larry", "--out", str(tmp_path), "--quick", "--json"]
    assert "azure_conv_2023" in CliRunner().invoke(evaluate, [*arguments, "--only", "8b"]).output
    assert "8b" in CliRunner().invoke(evaluate, [*arguments, "--only", "goodput"]).output
    result = CliRunner().invoke(evaluate, [*arguments, "--only", "costs"])
    report = json.loads(result.output.splitlines()[-1])
    assert set(report["rows"]) == {"order_10k_ms", "sal_100_us"}


def test_larry_shortens_the_median_under_a_burst() -> None:
    requests = bursty_requests(LENGTHS, 200, 40.0, seed=2)
    first = {
        weight: serve(requests, PROFILE, servers=1, policy=partial(Larry, weight=weight), seed=2).figures()["first_s_p50"]
        for weight in (1.0, 1e6)
    }
    arrival = serve(requests, PROFILE, servers=1, policy=FirstComeFirstServed, seed=2).figures()["first_s_p50"]
    assert first[1.0] < 0.7 * arrival
    assert first[1e6] == pytest.approx(arrival, rel=0.02)
