"""Compiling with numba, and where what was compiled is kept.

Numba's own cache does not see that a function in another module has changed, so the folder carries a digest of the solver's sources. It is
below NUMBA_CACHE_DIR where that is set, else in the user's cache, else in a private folder of the system's temporary one; where none can be
written (or another user owns it: what lies there is executed), nothing is kept and every process compiles anew.

Processes that write numba's cache at the same time can spoil it (numba's issue 4807), and each would take half a minute for the same work:
so one compiles, and the others wait for what it leaves (`alone`). What is all there is loaded without waiting (`complete`): who holds the
lock may have been stopped, or have next to no share of a core.
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


ALONE_WAIT_S = 180.0
"""Compiling takes half a minute; who waited so long does it as well as it can."""
_LOOK_S = 0.05


@contextlib.contextmanager
def alone(folder: Path | None = FOLDER, wait_s: float = ALONE_WAIT_S) -> Iterator[bool]:
    """While it is held, no other process holds it for the same folder; given back with the process at the latest. False where `wait_s`
    went by or there is no folder to lock: then it holds nothing, and the caller goes on."""
    try:
        handle = None if folder is None else os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # a full disk, a folder that is gone: nothing can be kept either
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
            time.sleep(_LOOK_S)
        else:
            return True


def complete(folder: Path | None = FOLDER) -> bool:
    """Whether all that was there at the end of a warm-up still is: of this code, this Python and numba, for this processor."""
    if folder is None:
        return False
    try:
        kept = _mark(folder).read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return bool(kept) and all((folder / name).exists() for name in kept)


def mark_complete(folder: Path) -> None:
    """To be called while it is held `alone`, with everything compiled."""
    mark = _mark(folder)
    unfinished = mark.with_suffix(".new")
    with contextlib.suppress(OSError):  # a full disk: the next ones wait for each other
        unfinished.write_text("".join(f"{path.relative_to(folder)}\n" for path in folder.glob("*/*.nb?")), encoding="utf-8")
        unfinished.replace(mark)


def _mark(folder: Path) -> Path:
    """By all that numba goes by where it looks for compiled code."""
    facts = (sys.version, numba.__version__, cpu_target.target_context.codegen().magic_tuple(), Path(__file__).resolve().parent)
    return folder / f"complete-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


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
