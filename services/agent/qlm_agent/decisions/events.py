"""What an agent's machine is told. Answers carry the number of the call that they answer; late ones of unknown calls change nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from qlm_agent.engines.port import FailureKind, FinishReason, Tier
from qlm_core.profile import HardwareProfile


class Outcome(Enum):
    """What became of one item of a call (`qlm_queue.values.StepStatus`)."""

    DONE = "done"
    STALE = "stale"
    GAP = "gap"
    ENDED = "ended"


class Message(StrEnum):
    """Kinds of control messages (`qlm_queue.values.ControlKind`)."""

    WAKE = "wake"
    HEAD_CHANGED = "head"
    CANCEL = "cancel"
    GATEWAY_REBOUND = "rebound"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledRun:
    """A request that the incarnation owns. `stored`: output tokens that the server has. `refusal`: why it cannot be read, else "".

    `deadline_s`: on the queue's clock; `slo_s`: from acceptance to it; both infinite for a strict priority. `first_token`: it
    bounds the first token only. `priority`: None for requests with an SLO. `resumable`: prompt + output are enough to go on faithfully
    elsewhere. `displacements`: how often earlier attempts were given back without having failed; `failed`: how many did."""

    run_id: str
    queue_id: str
    model: str
    prompt_tokens: int
    output_tokens_max: int
    stored: int
    refusal: str = ""
    deadline_s: float = math.inf
    slo_s: float = math.inf
    first_token: bool = False
    priority: int | None = None
    slo_class: str = ""
    resumable: bool = True
    displacements: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingGroup:
    """A group of the virtual queue: a model, the class and kind of its SLO ("p<priority>" for a strict priority), requests that wait."""

    model: str
    slo_class: str
    first_token: bool
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueHead:
    """The first group of the virtual queue (`qlm_queue.values.HeadGroup`). `first_deadline_s`, `first_token`, `priority`: as in PulledRun,
    of its first waiting request. `behind`: the groups behind it in their order, as far as the pull looked."""

    group_id: str
    model: str
    waiting: int
    waiting_prompt_tokens: int
    first_deadline_s: float = math.inf
    first_token: bool = False
    priority: int | None = None
    slo_class: str = ""
    behind: tuple[WaitingGroup, ...] = ()


# The server --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    call: int
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseWasLost:
    """The lease of this incarnation expired or another incarnation registered."""

    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PullAnswered:
    """`head`, `blocked_tokens`, `models_ahead` and `suspect` as in `qlm_queue.values.PullResult`."""

    call: int
    pulled: tuple[PulledRun, ...]
    head: QueueHead | None
    blocked_tokens: int
    models_ahead: tuple[str, ...] = ()
    suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedAnswered:
    call: int
    owned: tuple[PulledRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsAnswered:
    """To Emit, Complete and GiveBack: the outcome of each item, in order."""

    call: int
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAnswered:
    """To calls that answer nothing but that they are done."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLost:
    """The server is away or did not answer in time: the call may or may not have happened."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A control message; `run_id` for those about a run, else ""."""

    message: Message
    run_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareTold:
    """The rows of this agent's GPUs as they are known now, by model and by its clock, in the place of those before."""

    hardware: Mapping[str, HardwareProfile]


# The engine --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """A run ended on the engine with `tokens` new tokens; one of `finish` and `failure` is set."""

    run_id: str
    tokens: int
    finish: FinishReason | None = None
    failure: FailureKind | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTold:
    """New tokens of runs that go on, as (run, how many), and runs that ended. A run of which nothing was told counts as
    waiting."""

    counts: Sequence[tuple[str, int]] = ()
    ended: Sequence[EngineEnd] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOffloaded:
    """To OffloadRuns: the KV of `done` is in host memory; the others of `asked` go on as they were, or ended."""

    asked: Sequence[str]
    done: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsRestored:
    """To RestoreRuns: `done` go on; the others of `asked` are still offloaded."""

    asked: Sequence[str]
    done: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OthersTold:
    """What other clients of the active model's server hold, in the place of what was told before: runs, those that wait there included, and
    tokens of KV. Never told by engines that nobody shares."""

    runs: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded:
    """A transfer is done. `active`, `warm`: as all models are now. KV capacities are in tokens of the active one; that of the host is 0
    where nothing can be offloaded."""

    model: str
    tier: Tier
    took_s: float
    active: str
    warm: tuple[str, ...]
    kv_capacity_tokens: int
    host_kv_capacity_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNotLoaded:
    """A transfer failed; all models are where they were, as told."""

    model: str
    tier: Tier
    message: str
    active: str
    warm: tuple[str, ...]


# People and processes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """`next_wakeup_s` was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """Stop pulling; runs may go on for `finish_s`. `stop`: the process ends afterwards. `ask`: who wants an answer, 0 for nobody."""

    finish_s: float
    stop: bool
    ask: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAsked:
    """Bring a model to host memory (WARM), or drop it from there (COLD)."""

    ask: int
    model: str
    tier: Tier


Event = (
    Started
    | TimePassed
    | Registered
    | LeaseWasLost
    | PullAnswered
    | OwnedAnswered
    | ItemsAnswered
    | CallAnswered
    | CallLost
    | Told
    | HardwareTold
    | EngineTold
    | RunsOffloaded
    | RunsRestored
    | OthersTold
    | ModelLoaded
    | ModelNotLoaded
    | DrainAsked
    | LoadAsked
)
