"""Choice of the embedded server's allocator."""

from __future__ import annotations

from pathlib import Path

import pytest

from qlm_queue.embedded import server as embedded


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "libmimalloc.so") -> Path:
    """A distribution with a library, as pip leaves it."""
    library = folder / "cmeel.prefix" / "lib" / name
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    facts = folder / "some_allocator-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: some-allocator\nVersion: 1.0\n")
    (facts / "RECORD").write_text(f"{library.relative_to(folder)},,\nsome_allocator-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(str(folder))
    return library


def test_without_the_library_the_servers_own_allocator_is_set_up() -> None:
    assert embedded.allocator_path("no-such-package") is None
    assert embedded.with_allocator({"HOME": "/"}, "no-such-package") == {"HOME": "/", "GLIBC_TUNABLES": embedded.GLIBC_TUNABLES}


def test_what_the_parent_has_set_stands() -> None:
    assert embedded.with_allocator({"GLIBC_TUNABLES": "mine"}, "no-such-package") == {"GLIBC_TUNABLES": "mine"}


def test_the_library_is_loaded_behind_what_others_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = installed(tmp_path, monkeypatch)
    assert embedded.with_allocator({}, "some-allocator") == {"LD_PRELOAD": str(library)}
    assert embedded.with_allocator({"LD_PRELOAD": "/a.so"}, "some-allocator") == {"LD_PRELOAD": f"/a.so {library}"}


@pytest.mark.parametrize("missing", ["gone", "another", "spaced"])
def test_a_library_that_cannot_be_loaded_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Its file is gone, the package has none of that name, or its path would be read as two."""
    folder = tmp_path / ("a folder" if missing == "spaced" else "folder")
    folder.mkdir()
    library = installed(folder, monkeypatch, "other.so" if missing == "another" else "libmimalloc.so")
    if missing == "gone":
        library.unlink()
    assert embedded.allocator_path("some-allocator") is None
