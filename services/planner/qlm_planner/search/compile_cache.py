"""Compiles with numba, and caches the compiled code.

Numba's cache ignores changes in other modules, so the folder's name holds a digest of the solver's sources. It is below NUMBA_CACHE_DIR if
set, else in the user's cache, else in a private folder of the system's temporary one. If none is writable (or another user owns it: its
files are executed), every process compiles anew.
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
    """Digest of a package's modules."""
    digest = hashlib.sha256()
    for path in sorted(package.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def candidates() -> Iterator[Path]:
    """Folders for the cache, the best first."""
    configured = os.environ.get("NUMBA_CACHE_DIR")
    if configured:
        yield Path(configured)
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home
        pass
    else:
        yield home / "qlm"
    yield Path(tempfile.gettempdir()) / f"qlm-{os.getuid()}"


def usable(folder: Path) -> bool:
    """Creates a missing folder. Whether only this user can write it: its files are executed."""
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
    """The folder of the cache; None if no folder is usable."""
    name = f"solver-{sources_digest(package)}"
    return next((base / name for base in candidates() if usable(base) and usable(base / name)), None)


FOLDER = cache_folder(Path(__file__).parent)


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compiles at the first call for argument types, or loads the cached code. Releases the interpreter's lock."""
    return _compiled(function, inlined=False)


def lean(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`compiled` into its callers, for functions without new arrays: passing arrays and counting references to them costs more than a small
    function."""
    return _compiled(function, inlined=True)


def _compiled(function: Callable[Arguments, Result], *, inlined: bool) -> Callable[Arguments, Result]:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": not inlined, "forceinline": inlined}
    settings: Any = config
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(FOLDER or settings.CACHE_DIR)
    try:
        found: Callable[Arguments, Result] = numba.njit(cache=FOLDER is not None, **options)(function)
        return found
    finally:
        settings.CACHE_DIR = before
