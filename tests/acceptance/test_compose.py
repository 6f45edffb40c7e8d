"""docker-compose.yml: valid, and its services get settings that they accept."""

from __future__ import annotations

import shutil
import subprocess
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlm.cli.options import default_config_path
from qlm_process.config import load_config, parse_override

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
BUILT = {name: service for name, service in COMPOSE["services"].items() if "build" in service}
TIMEOUT_S = 60


@pytest.mark.parametrize("name", BUILT)
def test_each_service_accepts_its_settings(name: str) -> None:
    service = BUILT[name]
    dockerfile = Path(service["build"]["dockerfile"])
    assert (ROOT / dockerfile).is_file()
    kind = dockerfile.parent.name
    entrypoints = (f'ENTRYPOINT ["qlm", "{kind}"]', f'ENTRYPOINT ["python", "-m", "qlm_{kind}"]')
    assert any(entrypoint in (ROOT / dockerfile).read_text() for entrypoint in entrypoints)

    command = service["command"]
    entry = command[command.index("--name") + 1]
    overrides: dict[str, object] = dict(parse_override(value) for flag, value in pairwise(command) if flag == "--set")
    path: str | None = default_config_path()
    if "gpu" in service.get("profiles", ()):
        path = None  # its entry is the user's
    environment = {key: value for key, value in service["environment"].items() if key != "QLM_CONFIG"}
    cls = getattr(import_module(f"qlm_{kind}.config"), f"{kind.capitalize()}Config")
    config = load_config(cls, path, f"{kind}s", entry, overrides, environment)
    assert getattr(config, kind).name == entry
    assert config.queue.url == "redis://valkey:6379/0"
    assert getattr(config, kind).listen.rpartition(":")[0] in ("0.0.0.0", name)


@pytest.mark.parametrize("program", [("docker-compose",), ("docker", "compose")], ids=["v1", "v2"])
@pytest.mark.parametrize("profile", ["simulated", "gpu"])
def test_compose_reads_the_file(program: tuple[str, ...], profile: str) -> None:
    if (
        shutil.which(program[0]) is None
        or subprocess.run([*program, "version"], capture_output=True, timeout=TIMEOUT_S, check=False).returncode
    ):
        pytest.skip(f"{' '.join(program)} is not installed")
    done = subprocess.run(
        [*program, "-f", "docker-compose.yml", "--profile", profile, "config", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
