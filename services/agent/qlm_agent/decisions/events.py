"""Events of an agent's machine. Answers carry the number of their call; late answers of unknown calls change nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from qlm_agent.engines.port import FailureKind, FinishReason, Tier
from qlm_core.profiles.profile import HardwareProfile


class Outcome(Enum):
    """The outcome of one item of a call (`qlm_queue.values.StepStatus`)."""

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
    """A request that the incarnation owns. `stored`: output tokens that the server has. `refusal`: why the body cannot be read, else "".

    `deadline_s`: on the queue's clock; `slo_s`: from acceptance to it; both infinite for a strict priority. `first_token`: it bounds the
    first token only. `priority`: None for requests with an SLO. `resumable`: prompt + output are enough to continue faithfully elsewhere.
    `displacements`: earlier attempts given back without a failure; `failed`: earlier attempts that failed. `predicted_tokens`: output that
    the length model predicts, 0 where it is not in use."""

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
    predicted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingGroup:
    """A group of the virtual queue: a model, the class and kind of its SLO ("p<priority>" for a strict priority), requests that wait, and a
    bound that no deadline of them is before."""

    model: str
    slo_class: str
    first_token: bool
    waiting: int
    first_deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueHead:
    """The first group of the virtual queue (`qlm_queue.values.HeadGroup`). `first_deadline_s`, `first_token`, `priority`: as in PulledRun,
    of its first waiting request."""

    group_id: str
    model: str
    waiting: int
    waiting_prompt_tokens: int
    first_deadline_s: float = math.inf
    first_token: bool = False
    priority: int | None = None
    slo_class: str = ""


# The server -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterAnswer:
    call: int
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLoss:
    """The lease of this incarnation expired or another incarnation registered."""

    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PullAnswered:
    """As `qlm_queue.values.PullResult`; `behind` is None where the pull did not ask."""

    call: int
    pulled: tuple[PulledRun, ...]
    head: QueueHead | None
    blocked_tokens: int
    behind: tuple[WaitingGroup, ...] | None = None
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
    """Answers a call without a result."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLost:
    """The server is away or did not answer in time: the call may or may not have been carried out."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlMessage:
    """A control message; `run_id` if it concerns a run, else ""."""

    message: Message
    run_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesUpdated:
    """The current rows of this agent's GPUs, by model and by its clock; they replace all earlier ones."""

    hardware: Mapping[str, HardwareProfile]


# The engine -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnd:
    """A run ended on the engine with `tokens` new tokens; one of `finish` and `failure` is set."""

    run_id: str
    tokens: int
    finish: FinishReason | None = None
    failure: FailureKind | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProgress:
    """New tokens of running requests, as (run, count), and ended runs. A run counts as waiting until its first report. `cached`: of runs
    that the engine reports for the first time, as `EngineOutput` has it."""

    counts: Sequence[tuple[str, int]] = ()
    ended: Sequence[EngineEnd] = ()
    cached: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOffloaded:
    """Answers OffloadRuns: the KV of `done` is in host memory; the others of `requested` continue unchanged, or ended."""

    requested: Sequence[str]
    done: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsRestored:
    """Answers RestoreRuns: `done` continue; the others of `requested` are still offloaded."""

    requested: Sequence[str]
    done: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLoad:
    """Load of other clients on the active model's server, replacing the last report: runs, those waiting there included, and tokens of KV.
    Engines that are not shared never report it."""

    runs: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded:
    """A transfer is done. `active`, `warm`: the state of all models now. KV capacities are in tokens of the active model; the host's is 0
    if nothing can be offloaded."""

    model: str
    tier: Tier
    took_s: float
    active: str
    warm: tuple[str, ...]
    kv_capacity_tokens: int
    host_kv_capacity_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNotLoaded:
    """A transfer failed; all models are in the given tiers."""

    model: str
    tier: Tier
    message: str
    active: str
    warm: tuple[str, ...]


# People and processes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStart:
    """The first event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """`next_wakeup_s` was reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainCommand:
    """Stop pulling; runs may continue for `finish_s`. `stop`: the process ends then. `caller`: awaits the answer, 0 for nobody."""

    finish_s: float
    stop: bool
    caller: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCommand:
    """Bring a model to host memory (WARM), or drop it from there (COLD)."""

    caller: int
    model: str
    tier: Tier


Event = (
    AgentStart
    | TimePassed
    | RegisterAnswer
    | LeaseLoss
    | PullAnswered
    | OwnedAnswered
    | ItemsAnswered
    | CallAnswered
    | CallLost
    | ControlMessage
    | ProfilesUpdated
    | EngineProgress
    | RunsOffloaded
    | RunsRestored
    | OtherLoad
    | ModelLoaded
    | ModelNotLoaded
    | DrainCommand
    | LoadCommand
)
