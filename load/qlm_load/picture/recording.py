"""The recording of a run, in a file for later drawings: recording.json.

Times are real seconds since the start of the replay, `time_scale` trace seconds each.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from qlm_core.vocabulary.errors import ConfigError

FORMAT = 1
FRAMES_MAX = 20_000
"""Most frames of a recording; later ones are not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPart:
    """Waiting requests of neighbouring groups of one model and class, in the order of a virtual queue."""

    model: str
    slo_class: str
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFrame:
    """One instance. `up`: its agent answered. `queue`: waiting requests, served first first. `operations`: its agent's counters since it
    started; None while it is away."""

    up: bool
    model: str
    swapping_to: str
    running: int
    kv_share: float
    queue: tuple[QueuedPart, ...]
    operations: dict[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFrame:
    """The cluster at one moment. `unplaced`: accepted and in no group yet, None if no gateway answered. `serving`: by name."""

    at_s: float
    unplaced: int | None
    plan_version: int | None
    instances: dict[str, InstanceFrame]
    serving: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillMark:
    """A process was killed, and served again `up_after_s` later (None: it did not)."""

    process: str
    at_s: float
    held: int
    up_after_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndMark:
    """A request ended; `in_time`: within its SLO."""

    at_s: float
    slo_class: str
    attained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A whole run. `classes`: names of the SLO classes, the shortest first, with their trace seconds; `processes`: all of the run."""

    title: str
    time_scale: float
    models: tuple[str, ...]
    classes: dict[str, float]
    processes: tuple[str, ...]
    frames: tuple[ClusterFrame, ...]
    kills: tuple[KillMark, ...]
    ends: tuple[EndMark, ...]

    @property
    def instances(self) -> tuple[str, ...]:
        return tuple(sorted({name for frame in self.frames for name in frame.instances}))

    @property
    def duration_s(self) -> float:
        return self.frames[-1].at_s if self.frames else 0.0


_RECORDING = TypeAdapter(Recording)


def save(recording: Recording, path: Path) -> None:
    path.write_text(json.dumps({"format": FORMAT, **asdict(recording)}, separators=(",", ":")) + "\n", encoding="utf-8")


def load(path: Path) -> Recording:
    """Raises ConfigError for a file that is no recording of this version."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.pop("format") != FORMAT:
            raise ConfigError(f"{path}: a recording of another version")
        return _RECORDING.validate_python(document)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not a recording: {error}") from error
