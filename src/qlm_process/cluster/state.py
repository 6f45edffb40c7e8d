"""The state file of `qlm up`: who runs where. Tools read it; only `qlm up` writes it, whole and at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from qlm_core.vocabulary.errors import ConfigError

STATE_FILE = "up.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process. `service`: "gateway", "planner", "estimator", "agent" or "server" (the embedded server). `address`: "host:port" of its
    gRPC server once it is known, else "". `http`: "http://host:port" of a gateway that serves HTTP, else "". `restarts`: how often it was
    started again. `serving`: it was seen SERVING since its start."""

    name: str
    service: str
    pid: int = 0
    address: str = ""
    http: str = ""
    metrics_port: int = 0
    restarts: int = 0
    serving: bool = False
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """A running cluster. `pid`: that of `qlm up`. `ready`: all its processes have been serving since its start, or again since a
    restart."""

    pid: int
    queue: str
    queue_url: str
    ready: bool
    processes: tuple[ProcessState, ...]

    def of(self, service: str) -> tuple[ProcessState, ...]:
        return tuple(process for process in self.processes if process.service == service)


class ClusterStateFile:
    """`<state_dir>/up.json`."""

    def __init__(self, state_dir: str | Path) -> None:
        self.path = Path(state_dir) / STATE_FILE

    def write(self, state: ClusterState) -> None:
        """Replaces the file in one step, so that a reader never sees a half of it. Only its owner may read it: the queue's URL may hold a
        password."""
        document = asdict(state)
        fresh = self.path.with_suffix(".tmp")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1) + "\n")
        os.replace(fresh, self.path)

    def read(self) -> ClusterState:
        """The state, with pid 0 for processes that are not there any more, and not ready where `qlm up` has not noticed that yet. Raises
        ConfigError where no `qlm up` runs here."""
        try:
            document = json.loads(self.path.read_text(encoding="utf-8"))
            processes = tuple(ProcessState(**each) for each in document.pop("processes"))
            state = ClusterState(processes=processes, **document)
        except FileNotFoundError as error:
            raise ConfigError(f"{self.path}: not there; is `qlm up` running with this state folder?") from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.path}: not a state file of this version of `qlm up`: {error}") from error
        if not _alive(state.pid):
            raise ConfigError(f"{self.path}: left by a `qlm up` that is gone (process {state.pid})")
        there = tuple(_without_dead(state.processes))
        return replace(state, processes=there, ready=state.ready and there == state.processes)

    def remove(self) -> None:
        """Nothing where it is not there."""
        self.path.unlink(missing_ok=True)


def _without_dead(processes: Iterable[ProcessState]) -> Iterable[ProcessState]:
    for process in processes:
        yield process if process.pid == 0 or _alive(process.pid) else replace(process, pid=0, serving=False)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0
