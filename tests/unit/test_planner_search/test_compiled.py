"""Where compiled code is kept: a folder of our own, by the digest of the sources; nowhere where none is safe."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from drawn_problems import by_hand
from qlm_planner.search import Weights
from qlm_planner.search.compile_cache import FOLDER, cache_folder, sources_digest, usable
from qlm_planner.search.packing import packed
from qlm_planner.shell.warm_up import alone, complete, mark_complete, warm_up


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


def test_a_folder_others_may_write_is_not_used(tmp_path: Path) -> None:
    """Its files are executed."""
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
    began_s = time.process_time()
    warm_up()
    assert time.process_time() - began_s < 1.0


def test_a_planner_does_not_load_the_compiler() -> None:
    """It takes half a second, and its process only builds problems."""
    command = "import sys, qlm_planner.shell.process; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], timeout=60, check=False).returncode == 0


def test_whole_numbers_as_weights_compile_nothing_anew() -> None:
    """Arrays of another type would: half a minute in the middle of a plan."""
    whole = Weights(late=0, tardiness=0, work=0, completion=1)
    problem = by_hand(model=[0], work_s=[[1.0]], deadline_s=[9.0], kind=[0], active=[0])
    assert packed(replace(problem, weights=whole)).weights.dtype == packed(problem).weights.dtype


HOLDER = """
import sys, time
from pathlib import Path
from qlm_planner.shell.warm_up import alone
with alone(Path(sys.argv[1])) as held:
    print(held, flush=True)
    time.sleep(600.0)
"""


def test_one_process_at_a_time_compiles(tmp_path: Path) -> None:
    """A holder of the folder that dies gives it back."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        with alone(tmp_path, wait_s=0.2) as held:
            assert not held
        other.kill()
    with alone(tmp_path) as held:
        assert held


def test_complete_parts_are_loaded_without_waiting_for_a_stopped_holder() -> None:
    warm_up()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(FOLDER)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        loaded = subprocess.run(
            [sys.executable, "-c", "from qlm_planner.shell.warm_up import warm_up; warm_up()"], timeout=120, check=False
        )
        assert other.poll() is None, "it still held the folder"
        other.kill()
    assert loaded.returncode == 0


def test_a_folder_that_lacks_a_part_is_not_complete(tmp_path: Path) -> None:
    assert not complete(tmp_path)
    assert not complete(None)
    mark_complete(tmp_path)
    assert not complete(tmp_path), "nothing could be kept"
    (tmp_path / "solver").mkdir()
    parts = [tmp_path / "solver" / name for name in ("cost.nbi", "cost.1.nbc")]
    for part in parts:
        part.write_bytes(b"")
    mark_complete(tmp_path)
    assert complete(tmp_path)
    parts[1].unlink()
    assert not complete(tmp_path)


def test_without_a_folder_everybody_goes_on(tmp_path: Path) -> None:
    with alone(None) as held:
        assert not held
    with alone(tmp_path / "gone") as held:
        assert not held
