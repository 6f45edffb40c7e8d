"""The committed stubs are those that the protos give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATE_TIMEOUT_S = 100


def stubs_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*_pb2*.py*")) if path.suffix in (".py", ".pyi")
    }


def test_the_stubs_are_not_stale(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *outputs, *protos],
        cwd=ROOT,
        env={**os.environ, "PATH": tools},
        check=True,
        timeout=GENERATE_TIMEOUT_S,
    )
    committed = {name.removeprefix("qlm/"): body for name, body in stubs_in(ROOT / "src").items()}
    made = {name.removeprefix("qlm/"): body for name, body in stubs_in(tmp_path).items()}
    assert sorted(made) == sorted(committed), "run `make protos`"
    assert [name for name in made if made[name] != committed[name]] == [], "run `make protos`"
