"""The commands `qlm deploy plan` and `qlm deploy probe`: a model over unlike devices."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import click
import yaml
from rich.table import Table

from qlm_cli.console import json_text, plain_console
from qlm_cli.deploy.files import server_command, write_agent
from qlm_cli.serve.gpus import SMI_TIMEOUT_S, profile_name
from qlm_core.vocabulary.errors import ConfigError
from qlm_deploy.deployers import DEPLOYERS
from qlm_deploy.map_profile import profile_of_map
from qlm_deploy.plan import STRESS_TRIAL_S, Plan, plan_deployment
from qlm_deploy.probe import topology_of_cpu, topology_of_gpus
from qlm_deploy.stages import demand_of
from qlm_deploy.topology import Topology, parse_topology
from qlm_process.yaml_text import parse_yaml

LIST_GPUS = ("--query-gpu=name,memory.total", "--format=csv")
LIST_LINKS = ("topo", "-m")
COLUMNS = re.compile(r"\s*(\x1b\[[0-9;]*m)*\s*GPU0\b")


@click.group()
def deploy() -> None:
    """Split a model over unlike devices: which layers on which GPU, in which order, with the flags of vLLM that do it.

    Exit codes: 0 done; 2 wrong use, a damaged topology, an unknown model, or no map that fits.
    """


@deploy.command("plan")
@click.option("--model", "-m", required=True, metavar="MODEL", help="A model of qlm_core/data/model_facts.yaml.")
@click.option(
    "--topology",
    "path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="YAML file of devices and links (docs/reference/deploy.md), such as `qlm deploy probe` writes.",
)
@click.option(
    "--deployer",
    type=click.Choice(list(DEPLOYERS)),
    default="helr",
    show_default=True,
    help="helr: latency and devices; he: the fewest devices; lr: the least latency; greedy; even; stress: by trials.",
)
@click.option("--compare", is_flag=True, help="Print a table of all deployers.")
@click.option(
    "--apply",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write agent.yaml, the configuration of an agent for the map, and profile.yaml, its predicted profile.",
)
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png", help="Draw the maps (needs matplotlib).")
@click.option(
    "--kv-tokens", type=click.IntRange(min=0), default=8192, show_default=True, metavar="TOKENS", help="KV to keep room for on each stage."
)
@click.option(
    "--context-tokens",
    type=click.IntRange(min=0),
    default=1024,
    show_default=True,
    metavar="TOKENS",
    help="Context of the token predicted.",
)
@click.option(
    "--trial-s",
    type=click.FloatRange(min=0),
    default=STRESS_TRIAL_S,
    show_default=True,
    metavar="SECONDS",
    help="Load of one trial of `stress`; the loading of weights is added.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    model: str,
    path: Path,
    deployer: str,
    compare: bool,
    folder: Path | None,
    picture: Path | None,
    kv_tokens: int,
    context_tokens: int,
    trial_s: float,
    as_json: bool,
) -> None:
    """Print the device map, its predicted latency and throughput, memory by device, and the flags of vLLM."""
    if compare and folder is not None:
        raise click.UsageError("--apply takes the map of --deployer, and goes without --compare")
    topology, demand = read_topology(path), demand_of(model, context_tokens, kv_tokens)
    if not compare:
        plan = plan_deployment(deployer, topology, demand, trial_s)
        _draw([plan], picture)
        if folder is not None:
            written = write_agent(plan, profile_of_map(topology, demand, plan), folder)
            click.echo(f"written: {', '.join(map(str, written))}", err=True)
        if as_json:
            click.echo(json_text(asdict(plan)))
            return
        plain_console().print(_stages(plan))
        click.echo("\n".join(_facts(plan)))
        return
    plans: list[Plan] = []
    reasons: dict[str, str] = {}
    for name in DEPLOYERS:
        try:
            plans.append(plan_deployment(name, topology, demand, trial_s))
        except ConfigError as error:
            reasons[name] = error.message
    if not plans:
        raise ConfigError(reasons["helr"])
    _draw(plans, picture)
    if as_json:
        click.echo(json_text({"plans": [asdict(plan) for plan in plans], "without_map": reasons}))
        return
    plain_console().print(_comparison(plans))
    for name, reason in reasons.items():
        click.echo(f"{name}: {reason}")


def _draw(plans: list[Plan], path: Path | None) -> None:
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError("--picture needs matplotlib: pip install 'qlm-serving[load]'")
    from qlm_cli.deploy.picture import write_picture  # late: matplotlib takes a second

    write_picture(plans, path)


@deploy.command("probe")
@click.option(
    "--nvidia-smi",
    "saved",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Saved output of `nvidia-smi --query-gpu=name,memory.total --format=csv` and, after it, `nvidia-smi topo -m`, in place of a run.",
)
def probe(saved: Path | None) -> None:
    """Write the topology of this host to standard output: its GPUs and links by nvidia-smi; without it the CPU as one device.

    Speeds and bandwidths follow from data sheets and link classes until the file has measured ones."""
    if saved is not None:
        document = topology_of_output(_text(saved))
    elif shutil.which("nvidia-smi"):
        document = topology_of_output(_nvidia_smi(LIST_GPUS) + _nvidia_smi(LIST_LINKS))
    else:
        document = topology_of_cpu(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    click.echo(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120), nl=False)


def read_topology(path: Path) -> Topology:
    """Raises ConfigError that begins with the file."""
    try:
        return parse_topology(parse_yaml(_text(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def topology_of_output(text: str) -> dict[str, object]:
    """The list ends where the matrix begins: at its head of GPU columns."""
    lines = text.splitlines(keepends=True)
    head = next((place for place, line in enumerate(lines) if COLUMNS.match(line)), len(lines))
    return topology_of_gpus("".join(lines[:head]), "".join(lines[head:]), profile_name)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: must be a text file: {error}") from error


def _nvidia_smi(arguments: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"nvidia-smi does not answer: {error}") from error
    if done.returncode:
        raise ConfigError(f"nvidia-smi {' '.join(arguments)} failed: {(done.stdout + done.stderr).strip()[:300]}")
    return done.stdout


def _stages(plan: Plan) -> Table:
    table = Table(
        "stage", "device", "layers", "ms a token", "GiB", "of GiB", title=f"{plan.model} by {plan.deployer}", title_justify="left"
    )
    for place, stage in enumerate(plan.stages):
        layers = f"{stage.first_layer}-{stage.first_layer + stage.layers - 1} ({stage.layers})"
        memory = f"{stage.memory_gib:.2f}", f"{stage.usable_gib:.2f}"
        table.add_row(str(place), stage.device, layers, f"{stage.compute_ms:.3f}", *memory)
    return table


def _facts(plan: Plan) -> list[str]:
    search = [f"time of trials on the devices: {plan.search_s:.0f} s"] if plan.search_s else []
    bound = "" if plan.gap is None else f"; at most {plan.gap:.1%} above the optimum of its objective"
    return [
        f"latency {plan.latency_ms:.3f} ms a token, {plan.hops_ms:.3f} ms of it between stages",
        f"throughput {plan.tokens_per_s:.2f} tokens/s for one sequence, {plan.pipelined_tokens_per_s:.2f} with one a stage",
        f"utilisation {plan.utilisation:.1%} with one sequence{bound}",
        *search,
        server_command(plan),
    ]


def _comparison(plans: list[Plan]) -> Table:
    columns = ("deployer", "device map", "ms a token", "tokens/s", "pipelined", "utilisation", "search s")
    table = Table(*columns, title=plans[0].model, title_justify="left")
    for plan in plans:
        stages = " ".join(f"{stage.device}:{stage.layers}" for stage in plan.stages)
        rates = f"{plan.tokens_per_s:.2f}", f"{plan.pipelined_tokens_per_s:.2f}", f"{plan.utilisation:.1%}"
        table.add_row(plan.deployer, stages, f"{plan.latency_ms:.3f}", *rates, f"{plan.search_s:.0f}")
    return table
