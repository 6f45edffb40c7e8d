"""Temporary folders of child processes: removed by their owner, else by the next of their kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from qlm_process.temporary_folder import TemporaryFolder

OWNER = """
from qlm_process.temporary_folder import TemporaryFolder
folder = TemporaryFolder("kind")
(folder.path / "left").write_text("x")
print(folder.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def system_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_an_owner_removes_its_folder_and_what_is_in_it(system_folder: Path) -> None:
    folder = TemporaryFolder("kind")
    assert folder.path.parent == system_folder
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.environment == {"TMPDIR": str(folder.path)}
    (folder.path / "deep").mkdir()
    (folder.path / "deep" / "file").write_text("x")
    folder.remove()
    folder.remove()
    assert not list(system_folder.iterdir())


def test_the_next_of_a_kind_removes_the_folder_of_a_killed_owner_and_no_other(system_folder: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], env={**os.environ, "TMPDIR": str(system_folder)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    left = Path(owner.stdout.readline().decode().strip())
    other = system_folder / f"qlm-{os.getuid()}-other-1"
    other.mkdir()
    first = TemporaryFolder("kind")
    assert (left / "left").exists(), "its owner lives"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    second = TemporaryFolder("kind")
    assert not left.exists()
    assert first.path.exists()
    assert other.exists()
    first.remove()
    second.remove()


def test_a_full_disk_leaves_the_systems_folder(system_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    folder = TemporaryFolder("kind")
    assert folder.path == system_folder
    folder.remove()
    assert system_folder.exists()
