"""The command line as a whole: its help, its errors, and what it does not load."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from qlm_cli.root import COMMANDS, described, root
from qlm_core.errors import QueueFull

ROOT = Path(__file__).parents[2]
SERVICE_HELP = ("SECTION.NAME=VALUE", "_s seconds", "QLM_SECTION__NAME", "Exit codes")
UNITS = {
    "up": ("SECTION.NAME=VALUE", "DIR", "FILE", "QLM_SECTION__NAME", "Exit codes"),
    "submit": ("SECONDS", "TOKENS", "Exit codes"),
    "status": ("SECONDS",),
    "requests": ("Exit codes",),
    "pause": ("MODEL", "Exit codes"),
    "resume": ("MODEL", "Exit codes"),
    "assess": ("COUNT", "HOST:PORT", "seconds from now", "Exit codes"),
    "top": ("SECONDS", "HOST:PORT", "Exit codes"),
    "doctor": ("SECTION.NAME=VALUE", "FILE", "Exit codes"),
    "health": ("SECONDS", "HOST:PORT", "Exit codes"),
    "profile": ("SECONDS", "FILE", "SECTION.NAME=VALUE", "Exit codes"),
    "profiles": ("HOST:PORT", "Exit codes"),
    "models": ("DIR", "Exit codes"),
    "keys": ("Exit codes",),
    "load": ("Trace seconds in a real second", "Seconds after the last arrival", "per trace second", "Exit codes"),
    **dict.fromkeys(("gateway", "planner", "estimator", "agent"), SERVICE_HELP),
}
"""Units and kinds of values that the help has to tell."""


def test_help_lists_every_command_without_loading_one() -> None:
    result = CliRunner().invoke(root, ["--help"])
    assert result.exit_code == 0
    for name, (_, _, text) in COMMANDS.items():
        assert name in result.output
        assert text in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command_tells_its_flags_and_units(name: str) -> None:
    command = [sys.executable, "-m", "qlm_cli", name, "--help"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
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
    assert set(ast.literal_eval(output)) == {"qlm_core", "qlm_core.errors", "qlm_core.masking"}


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
def test_output_that_cannot_be_written_is_told_in_a_line(redirection: str, said: str) -> None:
    command = f"{sys.executable} -m qlm_cli --help {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr.strip()) == ("", said)
    assert done.returncode == 1 or not said
