"""Where compiled code is kept: a folder of our own, by the digest of the sources; nowhere where none is safe."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from qlm_planner.solver import warm_up
from qlm_planner.solver.compiled import cache_folder, sources_digest, usable


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "one.py").write_text("ONE = 1\n")
    return folder


def test_a_changed_source_has_another_folder(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "cache"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(base))
    before = cache_folder(package)
    assert before == cache_folder(package)
    assert before is not None
    assert before.parent == base
    (package / "one.py").write_text("ONE = 2\n")
    assert cache_folder(package) != before
    (package / "two.py").write_text("")
    assert len({sources_digest(package), before.name}) == 2


def test_what_others_may_write_is_not_used(tmp_path: Path) -> None:
    """What lies there is executed."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert not usable(shared)
    link = tmp_path / "link"
    (tmp_path / "own").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "own")
    assert not usable(link)
    assert usable(tmp_path / "own")


def test_the_next_place_is_taken_and_none_is_an_answer(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked / "below"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    found = cache_folder(package)
    assert found is not None
    assert found.parent.parent == tmp_path
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(blocked))
    assert cache_folder(package) is None


def test_warming_up_again_takes_next_to_nothing() -> None:
    warm_up()
    assert warm_up() < 1.0
