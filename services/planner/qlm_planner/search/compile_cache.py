"""Compiles with numba, and caches the compiled code.

Numba's cache ignores changes in other modules, so the folder's name holds a digest of the solver's sources. It is below NUMBA_CACHE_DIR if
set, else in the user's cache, else in a private folder of the system's temporary one. If none is writable (or another user owns it: its
files are executed), every process compiles anew.

Concurrent writers can damage numba's cache (numba issue 4807), and each compiles for half a minute: one process compiles, the others wait
(`alone`). A complete cache is loaded without the lock (`complete`), whose holder may be stopped or starved.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numba
from numba.core import config
from numba.core.registry import cpu_target

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

ALONE_WAIT_S = 180.0
"""Longest wait for another process that compiles, which takes half a minute; then this one compiles too."""
_POLL_S = 0.05


@contextlib.contextmanager
def alone(folder: Path | None = FOLDER, wait_s: float = ALONE_WAIT_S) -> Iterator[bool]:
    """Holds the folder's lock against other processes, until the process ends at the latest. False, without the lock, after `wait_s` or
    without a usable folder; the caller continues."""
    try:
        handle = None if folder is None else os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # a full disk or a removed folder: the cache is not usable either
        handle = None
    if handle is None:
        yield False
        return
    try:
        yield _locked(handle, wait_s)
    finally:
        os.close(handle)


def _locked(handle: int, wait_s: float) -> bool:
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def complete(folder: Path | None = FOLDER) -> bool:
    """Whether all files of a finished warm-up exist: of this code, this Python and numba, for this processor."""
    if folder is None:
        return False
    try:
        kept = _mark(folder).read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return bool(kept) and all((folder / name).exists() for name in kept)


def mark_complete(folder: Path) -> None:
    """Records the files of a finished warm-up. Needs the lock (`alone`)."""
    mark = _mark(folder)
    unfinished = mark.with_suffix(".new")
    with contextlib.suppress(OSError):  # a full disk: later processes wait for each other
        unfinished.write_text("".join(f"{path.relative_to(folder)}\n" for path in folder.glob("*/*.nb?")), encoding="utf-8")
        unfinished.replace(mark)


def _mark(folder: Path) -> Path:
    """The record for everything that numba's cache depends on."""
    facts = (sys.version, numba.__version__, cpu_target.target_context.codegen().magic_tuple(), Path(__file__).resolve().parent)
    return folder / f"complete-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


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
