"""The checks of GPUs as a dry run on this CPU: their parts that need PyTorch and vLLM run, and report figures that add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.decoder import SHAPES, Decoder
from benchmarks.gpu.torch_timing import fit_line, time_model

from qlm_core.profiles.hardware_prior import model_facts

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.sh"
TIMEOUT_S = 540.0


def dry_run(out: Path, *names: str) -> tuple[dict[str, str], str]:
    """The checks of these names: their status, and what was said."""
    only = [part for name in names for part in ("--only", name)]
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(SCRIPT), "--cpu", "--out", str(out), *only]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((out / "summary.json").read_text())
    return {each["name"]: each["status"] for each in summary["checks"]}, ran.stdout


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_a_dry_run_passes_and_leaves_its_figures(tmp_path: Path) -> None:
    status, said = dry_run(tmp_path, "torch_timing", "sleep_levels", "tensor_parallel")
    assert status == {"torch_timing": "passed", "sleep_levels": "passed", "tensor_parallel": "skipped"}
    assert "skipped  tensor_parallel" in said
    events = json.loads((tmp_path / "sleep_levels.json").read_text())["events"]
    assert [event["was"] for event in events] == ["cold"] * 2 + ["warm"] * 6 + ["cold"] * 6


@pytest.mark.timeout(TIMEOUT_S + 60)
def test_servers_take_turns_in_a_dry_run(tmp_path: Path) -> None:
    assert dry_run(tmp_path, "sleeping_servers")[0] == {"sleeping_servers": "passed"}
    results = json.loads((tmp_path / "sleeping_servers.json").read_text())
    assert ([event["model"] for event in results["events"]], results["answers"]) == (list("ababbb"), 8)


def test_steps_prefills_and_transfers_take_time() -> None:
    timed = time_model("cpu", "tiny", "float32", small=True)
    assert all(value > 0 for value in timed["transfers"].values())  # type: ignore[attr-defined]
    assert all(step["ms"] > 0 for step in timed["steps"])  # type: ignore[attr-defined]
    assert timed["figures"]["kv_bytes_per_token"] == 2 * 2 * 2 * 32 * 4  # type: ignore[index]


@pytest.mark.parametrize("name", ["Mistral-7B", "Llama-3.2-1B"])
def test_shapes_are_those_of_the_models(name: str) -> None:
    shape, facts = SHAPES[name], model_facts()[name]
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_size) == (
        facts.layers,
        facts.hidden_size,
        facts.kv_heads,
        facts.head_size,
    )
    tied = shape.vocabulary * shape.hidden if name == "Llama-3.2-1B" else 0  # one matrix for input and output there
    assert shape.parameters - tied == pytest.approx(facts.parameters_billion * 1e9, rel=0.005)


def test_a_step_over_the_cache_is_the_last_step_of_a_prefill() -> None:
    """One layer: the cache's keys and values are those of the inputs, so both ways see the same."""
    torch.manual_seed(1)
    shape = SHAPES["tiny"]
    decoder = Decoder(shape, "cpu", "float32")
    prompts = decoder.inputs(3, 16)
    cached = torch.zeros_like(decoder.kv(3, 16))
    seen: list[torch.Tensor] = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def keeping(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: bool) -> torch.Tensor:
        if options:
            group = shape.heads // shape.kv_heads
            seen.append(torch.stack([key[:, ::group], value[:, ::group]]))
        return attention(query, key, value, **options)

    torch.nn.functional.scaled_dot_product_attention = keeping
    try:
        first = decoder.prefill(prompts)
    finally:
        torch.nn.functional.scaled_dot_product_attention = attention
    for layer, both in enumerate(seen):
        cached[layer] = both
    cached[:, :, :, :, -1] = 0.0  # the step writes the last place
    assert torch.equal(decoder.decode(prompts[:, -1:], cached), first)


def test_a_line_is_found_again() -> None:
    rows = [(1.0, batch, batch * context) for batch in (1, 8, 32) for context in (256, 1024)]
    values = [5.0 + 0.1 * batch + 0.001 * tokens for _, batch, tokens in rows]
    assert fit_line(rows, values) == pytest.approx([5.0, 0.1, 0.001])
