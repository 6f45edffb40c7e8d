"""The command line as a whole: its help, its errors, and modules that it does not load."""

from __future__ import annotations

import ast
import io
import json
import math
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from qlm.values import GroupStatus
from qlm_cli.console import json_text, plain_console
from qlm_cli.options import default_config_path
from qlm_cli.root import COMMANDS, described, root
from qlm_cli.up.config import ProcessSpec, UpConfig, process_specs
from qlm_core.vocabulary.errors import ConfigError, QueueFull
from qlm_process.config import OVERRIDES_VARIABLE, load_config

ROOT = Path(__file__).parents[2]
SERVICE_HELP = ("SECTION.NAME=VALUE", "_s seconds", "QLM_SECTION__NAME", "Exit codes")
UNITS = {
    "up": ("SECTION.NAME=VALUE", "DIR", "FILE", "QLM_SECTION__NAME", "Exit codes"),
    "serve": ("[URL]...", "FILE", "HOST:PORT", "NAME=MODEL", "DIR", "Exit codes"),
    "submit": ("SECONDS", "TOKENS", "Exit codes"),
    "status": ("SECONDS",),
    "requests": ("Exit codes",),
    "pause": ("MODEL", "Exit codes"),
    "resume": ("MODEL", "Exit codes"),
    "top": ("SECONDS", "HOST:PORT", "Exit codes"),
    "doctor": ("SECTION.NAME=VALUE", "FILE", "Exit codes"),
    "health": ("SECONDS", "HOST:PORT", "Exit codes"),
    "profile": ("SECONDS", "FILE", "SECTION.NAME=VALUE", "Exit codes"),
    "profiles": ("HOST:PORT", "Exit codes"),
    "models": ("DIR", "Exit codes"),
    "deploy": ("Exit codes",),
    "keys": ("Exit codes",),
    "tune": ("trace seconds", "SECTION.NAME=VALUE", "FILE", "Exit codes"),
    "load": ("Trace seconds in a real second", "Seconds after the last arrival", "per trace second", "Exit codes"),
    **dict.fromkeys(("gateway", "planner", "estimator", "agent"), SERVICE_HELP),
}
"""Units and kinds of values that the help has to state."""


def test_help_lists_every_command_without_loading_one() -> None:
    result = CliRunner().invoke(root, ["--help"])
    assert result.exit_code == 0
    for name, (_, _, text) in COMMANDS.items():
        assert name in result.output
        assert text in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_states_its_flags_and_units(name: str) -> None:
    result = CliRunner().invoke(root, [name, "--help"], prog_name="qlm")
    assert result.exit_code == 0, result.output
    output = result.output
    assert f"Usage: qlm {name}" in output
    assert "--help" in output
    words = " ".join(output.split())
    for unit in UNITS[name]:
        assert unit in words


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(root, ["fly"])
    assert result.exit_code == 2
    assert "No such command 'fly'" in result.output


def test_submit_takes_one_objective_and_a_prompt() -> None:
    both = CliRunner().invoke(root, ["submit", "-m", "x", "--slo", "1", "--first-token-slo", "1", "prompt"])
    assert both.exit_code == 2
    assert "give one of --slo" in both.output
    not_text = CliRunner().invoke(root, ["submit", "-m", "x"], input=b"\xff\xfe")
    assert not_text.exit_code == 2
    assert "not UTF-8" in not_text.output


def test_a_malformed_override_is_refused() -> None:
    result = CliRunner().invoke(root, ["up", "--set", "queue.url"])
    assert result.exit_code == 2
    assert "section.name=value" in result.output


def test_an_error_is_one_line_with_its_reason_and_retry_hint() -> None:
    error = QueueFull("the queue is full", details={"retry_after_s": "2.5"})
    assert described(error) == "the queue is full [QUEUE_FULL] (try again in 2.5 s)"


def test_importing_the_sdk_loads_no_command_and_no_service() -> None:
    script = (
        "import sys, qlm; qlm.AsyncClient; print([name for name in sys.modules if name.startswith(('qlm_cli', 'qlm_')) or name == 'click'])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    loaded = {"qlm_core", "qlm_core.vocabulary", "qlm_core.vocabulary.errors", "qlm_core.vocabulary.masking"}
    assert set(ast.literal_eval(output)) == loaded


def test_every_machine_is_held_to_purity() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = (contract["source_modules"] for contract in contracts if contract["name"].startswith("Decisions are pure"))
    found = {path.with_suffix("").relative_to(ROOT / "services").parts[1:] for path in ROOT.glob("services/*/*/**/machine*")}
    machines = {parts for parts in found if parts[-1] == "machine"}  # a module or a package
    assert {parts[0] for parts in machines} == {"qlm_gateway", "qlm_planner", "qlm_estimator", "qlm_agent"}
    assert all({".".join(parts), ".".join(parts[:-1])} & set(pure) for parts in machines)
    assert "qlm_core" in pure


@pytest.mark.parametrize(
    ("redirection", "said"), [("> /dev/full", "Error: [Errno 28] No space left on device"), (">&-", ""), ("| true", "")]
)
def test_output_that_cannot_be_written_is_reported_in_a_line(redirection: str, said: str) -> None:
    command = f"{sys.executable} -m qlm_cli --help {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr.strip()) == ("", said)
    assert done.returncode == 1 or not said


# Commands show ids and names of models as they are --------------------------------------------------------------------


NAMES = ("[/red]", "[bold]", "[red]x[/red]", ":smile:", "[link=x]", "\\[x]", "[", "[/]", "[@click=f]x[/]")


@pytest.mark.parametrize("name", NAMES)
def test_names_are_no_markup(name: str) -> None:
    console = plain_console()
    console.file = file = io.StringIO()
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console.print(name, table)
    assert file.getvalue().count(name) == 4


# JSON of commands: no figure in it that readers of JSON refuse --------------------------------------------------------


def refuse(name: str) -> object:
    raise AssertionError(f"{name} is no JSON")


def test_a_group_without_a_deadline() -> None:
    group = GroupStatus(group_id="g", model="m", slo_kind="priority", slo_class="p3", waiting=2, first_deadline_s=math.inf)
    read = json.loads(json_text({"groups": (asdict(group),)}), parse_constant=refuse)
    assert read == {"groups": [{**asdict(group), "first_deadline_s": None}]}


@pytest.mark.parametrize("value", [0, -1.5, True, None, "text", [], {}, 2**60])
def test_the_rest_is_as_it_was(value: object) -> None:
    assert json.loads(json_text({"a": [value]})) == {"a": [value]}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_is_null(value: float) -> None:
    assert json_text([value]) == "[null]"


# Processes of `qlm up`, from its settings -----------------------------------------------------------------------------


def load(**overrides: str) -> UpConfig:
    return load_config(UpConfig, default_config_path(), overrides=overrides, environment={})


def settings(spec: ProcessSpec) -> dict[str, object]:
    found: dict[str, object] = json.loads(spec.environment[OVERRIDES_VARIABLE])
    return found


def test_the_shipped_configuration_has_two_gpus_and_one_of_each_service() -> None:
    specs = process_specs(load(), "qlm.yaml", {"agent.batch_max": "8"}, "redis://h:1")
    assert [(spec.service, spec.name) for spec in specs] == [
        ("gateway", "gateway-0"),
        ("planner", "planner-0"),
        ("estimator", "estimator-0"),
        ("agent", "a100-0"),
        ("agent", "h100-0"),
    ]
    command = specs[3].command
    assert command[1:7] == ("-m", "qlm_agent", "--config", "qlm.yaml", "--name", "a100-0")
    assert settings(specs[3])["agent.batch_max"] == "8"


def test_no_setting_stands_on_a_command_line() -> None:
    given = {"queue.url": "redis://:secret@h:1", "agent.openai.base_url": "http://u:secret@h"}
    for spec in process_specs(load(), "qlm.yaml", given, "redis://:secret@h:1"):
        assert not any("secret" in part for part in spec.command)
        assert settings(spec).items() >= given.items()
        assert load_config(UpConfig, None, environment=spec.environment).queue.url == "redis://:secret@h:1"


def test_a_whole_queue_section_that_was_given_does_not_hide_the_url() -> None:
    (first, *_) = process_specs(load(), "qlm.yaml", {"queue": "{name: other}"}, "redis://h:1")
    queue = load_config(UpConfig, None, environment=first.environment).queue
    assert (queue.name, queue.url) == ("other", "redis://h:1")
    (first, *_) = process_specs(load(), "qlm.yaml", {"queue.url": "redis://x", "queue": "{name: other}"}, "redis://h:1")
    assert load_config(UpConfig, None, environment=first.environment).queue.url == "redis://h:1"


def test_metrics_ports_follow_the_base() -> None:
    config = load(**{"up.metrics_port_base": "9100"})
    ports = [settings(spec)["telemetry.metrics_port"] for spec in process_specs(config, "f", {}, "u")]
    assert ports == [9100, 9101, 9102, 9103, 9104]


def test_two_processes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two processes are named 'a100-0'"):
        load(planners="[{name: a100-0}]")


def test_a_standby_is_one_more_entry() -> None:
    config = load(planners="[{name: planner-0}, {name: planner-1}]")
    assert [entry.name for entry in config.planners] == ["planner-0", "planner-1"]
