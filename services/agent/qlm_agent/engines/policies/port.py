"""The policy port inside an engine: which runs hold seats and KV. Pure; the simulated engine calls it at each step, and engines with their
own scheduler use it as a plug-in.

The policy is the only one that preempts inside the engine (see docs/reference/engine-policies.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from operator import attrgetter
from typing import Protocol, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]
Positions: TypeAlias = NDArray[np.intp]
Flags: TypeAlias = NDArray[np.bool_]

QUANTILE_LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Levels of a predicted length (`SequenceView.quantiles`)."""
MEDIAN = QUANTILE_LEVELS.index(0.5)


class Residence(IntEnum):
    """Where the KV of a run is."""

    NONE = 0
    GPU = 1
    HOST = 2
    MOVING = 3


class KvRule(Enum):
    """KV of paused runs where others need the room (FastServe, section 4.2). RECOMPUTE drops it. DEFER keeps it, and runs without KV wait.
    REACTIVE copies it to host memory, and the next step waits for the copy. PROACTIVE copies it ahead of the need, beside the steps."""

    RECOMPUTE = "recompute"
    DEFER = "defer"
    REACTIVE = "reactive"
    PROACTIVE = "proactive"


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceView:
    """A policy's view of a run, which only the engine writes, except `note`. Times are of the engine's clock.

    `arrival`: order of arrival, from the request (vLLM) or the engine's count. `preemptions`: how often it lost its KV in this engine.
    `waiting_since_s`: its arrival, or when it last lost its seat. `served_s`: seconds of steps with it. `max_tokens`: 0 for unknown.
    `quantiles`: of its predicted length in tokens, at QUANTILE_LEVELS; empty for none. `true_tokens`: its length, which only a simulator
    knows and shows to an oracle; else 0. `note`: a number that the policy keeps with the run, -1 at first and after a time outside.
    """

    run_id: str
    arrival: int
    deadline_s: float
    priority: int
    prompt_tokens: int
    produced_tokens: int
    preemptions: int = 0
    arrived_s: float = 0.0
    waiting_since_s: float = 0.0
    served_s: float = 0.0
    max_tokens: int = 0
    quantiles: tuple[float, ...] = ()
    true_tokens: int = 0
    residence: Residence = Residence.NONE
    note: int = -1

    @property
    def prefill_left_tokens(self) -> int:
        """Tokens to prefill before its next token; 0 with KV."""
        return 0 if self.residence else self.prompt_tokens + self.produced_tokens


class Sequences(Sequence[SequenceView]):
    """Runs, as rows and as columns; both are built when first read and hold for one call of a policy."""

    def __init__(self, rows: Callable[[], Sequence[SequenceView]] | Sequence[SequenceView]) -> None:
        self._given = rows
        self._rows: Sequence[SequenceView] | None = None
        self._columns: dict[str, Numbers] = {}

    @property
    def rows(self) -> Sequence[SequenceView]:
        if self._rows is None:
            self._rows = self._given() if callable(self._given) else self._given
        return self._rows

    def column(self, name: str) -> Numbers:
        """A number of every run, by its name in SequenceView; not to be written."""
        found = self._columns.get(name)
        if found is None:
            rows = self.rows
            found = self._columns[name] = np.fromiter(map(attrgetter(name), rows), np.float64, len(rows))
        return found

    def numbers(self, name: str, positions: Positions) -> Numbers:
        """The same of few runs."""
        read, rows = attrgetter(name), self.rows
        return np.array([read(rows[position]) for position in positions.tolist()], np.float64)

    def quantiles(self) -> Numbers:
        """Predicted lengths: a row a run, a column a level; NaN without a prediction."""
        unknown = (np.nan,) * len(QUANTILE_LEVELS)
        return np.array([run.quantiles or unknown for run in self.rows], np.float64).reshape(-1, len(QUANTILE_LEVELS))

    def names(self, positions: Positions) -> list[str]:
        """Run ids at positions."""
        rows = self.rows
        if 4 * len(positions) < len(rows):
            return [rows[position].run_id for position in positions.tolist()]
        ids = np.fromiter(map(attrgetter("run_id"), rows), np.object_, len(rows))  # all in the order of memory takes two thirds of the time
        found: list[str] = ids[positions].tolist()
        return found

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, position: int) -> SequenceView: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[SequenceView]: ...
    def __getitem__(self, position: int | slice) -> SequenceView | Sequence[SequenceView]:
        return self.rows[position]


class EngineView(Protocol):
    """A policy's view of its engine, as of the call in which it is read."""

    @property
    def model(self) -> str: ...
    @property
    def seats(self) -> int:
        """Most runs in one step."""

    @property
    def kv_capacity_tokens(self) -> int: ...
    @property
    def kv_free_tokens(self) -> int: ...
    @property
    def step_tokens_max(self) -> int:
        """Budget of prompt tokens of a step; 0 for unknown."""

    def expected_step_s(self, decoding: int, context_tokens: int, prefills: Sequence[tuple[int, int]]) -> float:
        """Expected seconds of a step: decoding runs, their context in all, prefills as (tokens before, tokens)."""


class EnginePolicy(Protocol):
    """To be subclassed: methods with a body are optional. Times are seconds of the engine's clock. Answers name runs that were shown, each
    at most once. `kv`: what becomes of the KV of paused runs. `oracle`: whether it is shown true lengths, in a simulator."""

    kv: KvRule = KvRule.RECOMPUTE
    oracle: bool = False

    def reset(self, engine: EngineView) -> None:
        """A model became active; earlier runs are gone. `engine` can be read in later calls."""
        return

    def order(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        """Waiting runs that may be admitted, the first to be admitted first, paused ones among them; those left out are held back. Called
        again when the waiting runs changed, when one ended while others were held back, and at `next_wakeup_s`."""

    def pause(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        """Decoding runs that leave their seats and keep their KV. Called right after `order`, with the same runs."""
        return ()

    def preempt(self, now_s: float, waiting: Sequences, running: Sequences) -> Sequence[str]:
        """Running runs to preempt for the first of `waiting`, in order; they are computed again. Called after `pause`, with the waiting
        runs in order from the first one without a seat or KV; the engine takes as many as that one needs, or none if all of them do not
        suffice, and calls again for the next one without room."""
        return ()

    def victims(self, now_s: float, running: Sequences) -> Sequence[str]:
        """All of the runs, running or paused, the first to lose its KV first. Called when KV is short; the engine takes as many as it
        needs."""

    def next_wakeup_s(self, now_s: float) -> float | None:
        """When the order changes by itself, None for never."""
        return None


def takes_seats(policy: EnginePolicy) -> bool:
    """Whether a policy takes seats from running runs by itself, not only where KV is short."""
    kind = type(policy)
    return kind.pause is not EnginePolicy.pause or kind.preempt is not EnginePolicy.preempt
