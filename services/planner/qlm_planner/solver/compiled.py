"""Compiling with numba, and where what was compiled is kept.

Numba's own cache does not see that a function in another module has changed, so the folder carries a digest of the solver's sources. It is
below NUMBA_CACHE_DIR where that is set, else in the user's cache, else in a private folder of the system's temporary one; where none can be
written (or another user owns it: what lies there is executed), nothing is kept and every process compiles anew.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core import config

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def sources_digest(package: Path) -> str:
    """Of all modules of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def candidates() -> Iterator[Path]:
    """Folders that may hold the cache, the best first."""
    told = os.environ.get("NUMBA_CACHE_DIR")
    if told:
        yield Path(told)
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home
        pass
    else:
        yield home / "qlm"
    yield Path(tempfile.gettempdir()) / f"qlm-{os.getuid()}"


def usable(folder: Path) -> bool:
    """Made where it is missing; ours alone to write, since what lies there is executed."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.lstat()
    except OSError:
        return False
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and state.st_uid == os.getuid()
        and not state.st_mode & 0o022
        and os.access(folder, os.W_OK)
    )


def cache_folder(package: Path) -> Path | None:
    """None where nothing can be kept."""
    name = f"solver-{sources_digest(package)}"
    return next((base / name for base in candidates() if usable(base) and usable(base / name)), None)


FOLDER = cache_folder(Path(__file__).parent)


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compiles at the first call with arguments of some types, or loads what was compiled. Without the interpreter's lock."""
    return _compiled(function, counts=True)


def lean(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """For what makes no arrays and returns none: without counting the references to those that it is handed, which costs more than a small
    function does."""
    return _compiled(function, counts=False)


def _compiled(function: Callable[Arguments, Result], *, counts: bool) -> Callable[Arguments, Result]:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": counts}
    if FOLDER is None:
        made: Callable[Arguments, Result] = numba.njit(**options)(function)
        return made
    settings: Any = config
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(FOLDER)
    try:
        kept: Callable[Arguments, Result] = numba.njit(cache=True, **options)(function)
        return kept
    finally:
        settings.CACHE_DIR = before
