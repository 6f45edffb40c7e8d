"""Compiles the solver once a machine, before it is needed.

Concurrent writers can damage numba's cache (numba issue 4807), and each compiles for half a minute: one process compiles, the others wait
(`alone`). A complete cache is loaded without the lock (`complete`), whose holder may be stopped or starved.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core.registry import cpu_target

from qlm_planner.search.compile_cache import FOLDER
from qlm_planner.search.problem import FIELDS, Orders, Problem
from qlm_planner.search.solver import evaluate, improve, solve

ALONE_WAIT_S = 180.0
"""Longest wait for another process that compiles, which takes half a minute; then this one compiles too."""
_POLL_S = 0.05


def warm_up() -> float:
    """Loads all compiled code from the cache, or compiles it, one process at a time; returns the seconds taken."""
    began_s = time.perf_counter()
    if complete():
        _use_all()
    else:
        with alone() as held:
            _use_all()
            if held and FOLDER is not None:
                mark_complete(FOLDER)
    return time.perf_counter() - began_s


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


def _use_all() -> None:
    problem = _tiny()
    found = solve(problem, moves=40, seed=0)
    evaluate(problem, found.orders)
    left = Orders.of([[group for group in queue if group] for queue in found.orders.lists()])
    improve(problem, left, moves=4, seed=0)


def _tiny() -> Problem:
    """Two queues, three groups: enough for the types of every compiled function."""
    sizes = {"g": 3, "q": 2, "m": 2, "k": 1}
    arrays: dict[str, Any] = {name: np.ones([sizes[each] for each in shape]) for name, (shape, _, _) in FIELDS.items()}
    arrays |= {
        "model": np.array([0, 1, 0], dtype=np.int32),
        "band": np.zeros(3, dtype=np.int32),
        "deadline_s": np.array([1.0, 2.0, math.inf]),
        "kind": np.zeros(2, dtype=np.int32),
        "active": np.array([0, -1], dtype=np.int32),
        "warm": np.zeros((2, 2), dtype=np.bool_),
        "head": np.array([0, -1], dtype=np.int32),
        "clear_cost": np.full(2, math.inf),
    }
    return Problem(**arrays)
