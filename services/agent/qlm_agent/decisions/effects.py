"""Effects of the agent's machine. Effects with `call` are answered by an event with that number; the shell performs engine effects in
order."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_agent.decisions.runs import Ending, RemovalCause, ReturnCause
from qlm_agent.engines.port import Tier

# The server -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Registers a new incarnation. A retry of a lost call repeats `nonce_number`, so that one nonce serves both. `yields`: wait while an
    older process serves the instance."""

    call: int
    nonce_number: int
    yields: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """Publish that the instance drains."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deregister:
    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """See `qlm_queue.values.PullBudget`. `model` "": read the head only; `behind`: also the groups behind it."""

    call: int
    model: str
    requests_max: int
    kv_tokens: int
    output_reserve_tokens: int
    owned_aside: int
    suspects: bool = False
    behind: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOwned:
    call: int


@dataclass(frozen=True, slots=True)
class EmitItem:
    """Tokens `start` to `end` of a run's output."""

    run_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    call: int
    items: tuple[EmitItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteItem:
    """The end of a run, with its tokens from `start` on."""

    run_id: str
    start: int
    end: int
    ending: Ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    call: int
    items: tuple[CompleteItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """Requeue, or unpull if `cause` is UNSTARTED or DISPLACED. `failure`: the reason, if `cause` is FAILED."""

    call: int
    run_ids: tuple[str, ...]
    cause: ReturnCause
    failure: str = ""


# The engine -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRun:
    """`length_quantiles`: of its predicted output in tokens, as in `EngineRequest`."""

    run_id: str
    length_quantiles: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRuns:
    run_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRuns:
    """Moves their KV to host memory. Answered by RunsOffloaded."""

    run_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRuns:
    """Moves their KV back to the GPU. Answered by RunsRestored."""

    run_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """Answered by ModelLoaded or ModelNotLoaded."""

    model: str
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseEngine:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeEngine:
    pass


# The shell's own ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRun:
    """The run is no longer this agent's: drop its tokens."""

    run_id: str
    cause: RemovalCause


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAnswer:
    """Answers all drain commands: the agent owns nothing any more."""

    callers: tuple[int, ...]
    finished: int
    given_back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAnswer:
    """`problem`: a reason of errors.proto, "" for a load done in `took_s`."""

    caller: int
    took_s: float = 0.0
    problem: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """All is given back: the process may end."""


Effect = (
    Register
    | Describe
    | Deregister
    | Pull
    | ReadOwned
    | Emit
    | Complete
    | GiveBack
    | StartRun
    | AbortRuns
    | OffloadRuns
    | RestoreRuns
    | LoadModel
    | PauseEngine
    | ResumeEngine
    | ForgetRun
    | DrainAnswer
    | LoadAnswer
    | Stop
)
