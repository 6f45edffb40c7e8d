"""The temporary folder of a child process: what it and its libraries leave there is removed with it, or at the next start.

Solvers and engines are ended by a kill, after which nobody removes their files. The parent makes the folder, holds a lock on it as long as
it lives (the kernel lets go of it, however the parent ends), and removes the folders of its kind that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import structlog

TRIES_MAX = 10
"""To make a folder that nobody takes for a forgotten one before it is locked."""


class TemporaryFolder:
    """A new folder in the system's temporary one, ours alone. `kind`: of the child; folders of the same kind and user that nobody holds are
    removed first. Where no folder can be made (a full disk), `path` is the system's, and nothing is removed from it."""

    def __init__(self, kind: str) -> None:
        prefix = f"qlm-{os.getuid()}-{kind}-"
        self.path = Path(tempfile.gettempdir())
        self._lock = -1
        for folder in self.path.glob(f"{prefix}*"):
            _remove_if_free(folder)
        for _ in range(TRIES_MAX):
            try:
                made = Path(tempfile.mkdtemp(prefix=prefix))
                lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # removed as a forgotten one between the two
                continue
            except OSError as error:
                structlog.get_logger().warning("temporary_folder_not_made", kind=kind, error=str(error))
                return
            fcntl.flock(lock, fcntl.LOCK_EX)
            if made.exists():
                self.path, self._lock = made, lock
                return
            os.close(lock)

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment of a process that leaves its files here."""
        return {"TMPDIR": str(self.path)}

    def remove(self) -> None:
        """Removes the folder and what is in it, once its process has ended. Safe twice."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def _remove_if_free(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone by now, or not ours
        return
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:  # its owner lives
        pass
    finally:
        os.close(lock)
