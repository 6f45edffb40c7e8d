"""The wheel: built once, it holds everything, runs outside of the source tree, and brings the client alone unless more is requested."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from running_cluster import RunningCluster

pytestmark = pytest.mark.xdist_group("cluster")

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = tuple(ROOT / package for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of `make release`, or a new one."""
    if given := os.environ.get("QLM_TEST_WHEEL"):
        return ROOT / given
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel alone."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    run(sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The dependencies of this environment, which is not searched for our own packages: .pth files work in site folders alone."""
    return {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}


def test_every_package_and_data_file_is_in_the_wheel(wheel: Path) -> None:
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    in_tree = {
        str(path.relative_to(package.parent))
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name.partition("/")[0] for name in in_tree} == {package.name for package in PACKAGES}
    assert in_tree <= in_wheel
    for package in PACKAGES:
        assert f"{package.name}/py.typed" in in_wheel
    assert "qlm_cli/default_config.yaml" in in_wheel


def test_no_package_of_the_tree_is_left_out() -> None:
    roots = [*ROOT.glob("src/*/__init__.py"), *ROOT.glob("services/*/*/__init__.py"), *ROOT.glob("load/*/__init__.py")]
    assert {path.parent for path in roots} == set(PACKAGES)


def test_the_command_runs_from_a_fresh_environment(installed: Path, environment: dict[str, str], tmp_path: Path) -> None:
    version = PROJECT["project"]["version"]
    assert f"qlm, version {version}" in run(installed / "bin/qlm", "--version", cwd=tmp_path, env=environment)
    script = """
from click.testing import CliRunner
from qlm_cli.root import root

for command in ("up", "gateway", "planner", "estimator", "agent", "submit", "status", "load"):
    done = CliRunner().invoke(root, [command, "--help"])
    assert done.exit_code == 0 and "--help" in done.output, (command, done)
"""
    run(installed / "bin/python", "-c", script, cwd=tmp_path, env=environment)


def test_every_package_is_imported_from_there(installed: Path, environment: dict[str, str], tmp_path: Path) -> None:
    names = [package.name for package in PACKAGES]
    script = f"import importlib\nfor name in {names}: print(importlib.import_module(name).__file__)"
    files = run(installed / "bin/python", "-c", script, cwd=tmp_path, env=environment).split()
    assert len(files) == len(names)
    assert all(file.startswith(str(installed)) for file in files)


def test_the_shipped_configuration_is_read_from_there(installed: Path, environment: dict[str, str], tmp_path: Path) -> None:
    script = "from qlm_cli.options import default_config_path as path; print(open(path()).read())"
    text = run(installed / "bin/python", "-c", script, cwd=tmp_path, env=environment)
    assert "a100-0" in text


def lowest_versions() -> list[str]:
    return [each.split(",")[0].replace(">=", "==") for each in PROJECT["project"]["dependencies"]]


@pytest.fixture(scope="module", params=["resolved", "lowest"])
def client_only(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with what `pip install qlm-serving` resolves to, or with the lowest versions that it allows."""
    folder = tmp_path_factory.mktemp("client")
    venv.create(folder, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", wheel]
    command += lowest_versions() if request.param == "lowest" else []
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if "No matching distribution" in done.stderr and not os.environ.get("CI"):
        pytest.skip("pip reaches no packages")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_client_alone_streams_an_answer(client_only: Path, cluster: RunningCluster, tmp_path: Path) -> None:
    """Without anything of the server's, from a bare environment, against a running cluster."""
    script = """
import asyncio, sys, qlm

async def main():
    async with qlm.AsyncClient(sys.argv[1]) as client:
        return "".join([chunk.text async for chunk in client.generate("mistral-7b", "Hello", slo_s=60, max_tokens=8)])

assert asyncio.run(main())
assert not {"click", "numpy", "redis", "structlog", "qlm_cli", "qlm_queue"} & set(sys.modules), sorted(sys.modules)
"""
    run(client_only / "bin/python", "-W", "error", "-c", script, cluster.address, cwd=tmp_path)


def test_the_client_alone_says_what_the_commands_need(client_only: Path, tmp_path: Path) -> None:
    done = subprocess.run([client_only / "bin/qlm", "up"], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    assert "pip install 'qlm-serving[server]'" in done.stderr
