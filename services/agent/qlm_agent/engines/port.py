"""The engine port: the agent's contract with any source of tokens. Simulated, vLLM and OpenAI-compatible engines implement it, and
`tests/conformance/engine` checks it.

- Times are seconds of `time.monotonic()`, the engine's clock.
- A run is one attempt of one request. The agent chooses its `run_id`; it is never used twice.
- Output is either token ids or, from text engines, pieces; one engine always returns the same kind for a model.
- Outputs of a run are in order and without gaps, and continue the earlier output. After `abort` returned there are no more.
- For a run with logprobs each token id has a record of `qlm_agent.delivery.logprobs`; text engines refuse such runs.
- A run is on the GPU (it waits, prefills or decodes) or offloaded: its KV is in host memory and waits there for `restore`.
- One task reads `outputs`; the other methods may be called meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol

from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import PreconditionFailed


class Tier(StrEnum):
    """Where a model's weights are."""

    ACTIVE = "active"  # in GPU memory: it serves
    WARM = "warm"  # in host memory
    COLD = "cold"  # on disk only


class FinishReason(Enum):
    """Why a run ended by itself."""

    STOP = "stop"
    LENGTH = "length"


class FailureKind(Enum):
    """Why an engine failed a run."""

    REFUSED = "refused"  # it will never be served: wrong parameters, longer than the context
    KV_CAPACITY = "kv_capacity"  # it alone needs more KV than there is
    BROKEN = "broken"  # the engine failed it, and serves others: another attempt may succeed
    AWAY = "away"  # the engine serves nobody, or never got it: not an attempt of the request


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Token ids of the model's vocabulary."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Text for the model's own tokenizer. `control_tokens`: as `control_tokens_in_text` of request.proto."""

    text: str
    control_tokens: bool = False


Prompt = TokenPrompt | TextPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters with the meaning and bounds of `SamplingParams` in request.proto; None is the model's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: str = ""
    regex: str = ""

    @property
    def resumable(self) -> bool:
        """Whether prompt + produced tokens are enough to continue faithfully after an abort."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty not in (None, 1.0)
        return self.seed is None and not penalised and not self.json_schema and not self.regex


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One run. `produced`: output of earlier attempts, token ids as little-endian uint32; `produced_pieces`: the same from a text engine.
    `output_tokens_max` includes it and is greater. `prompt_tokens`: as counted at the gateway. `arrival` (0: the engine counts),
    `deadline_s` (engine's clock, infinite for none), `priority` (lower first) and `length_quantiles` (of the predicted output in tokens, at
    `policies.port.QUANTILE_LEVELS`) are for the engine's policy."""

    run_id: str
    model: str
    prompt: Prompt
    prompt_tokens: int
    output_tokens_max: int
    produced: bytes = b""
    produced_pieces: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    arrival: int = 0
    deadline_s: float = float("inf")
    priority: int = 0
    length_quantiles: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """Why a run failed; `message` is for people."""

    kind: FailureKind
    message: str


@dataclass(slots=True)
class EngineOutput:
    """New output of a run, made from `first_s` to `last_s`; it may be empty at the end of the run. `started_s`: when the engine began the
    run. `logprobs`: a record for each token, if requested. `paused_s`: seconds since its first token without a seat by the engine's policy,
    as far as the engine knows. `cached_tokens`: of prompt and earlier output, what the engine's prefix cache had when the run began; None
    where the engine does not report it, or not yet. At most one of `finish` and `failure` is set, on the last output of a run. (Not frozen,
    since one is made for each token.)"""

    run_id: str
    token_ids: bytes
    started_s: float
    first_s: float
    last_s: float
    pieces: tuple[str, ...] = ()
    logprobs: bytes = b""
    finish: FinishReason | None = None
    failure: EngineFailure | None = None
    paused_s: float = 0.0
    cached_tokens: int | None = None

    def extend(self, later: EngineOutput) -> None:
        """Takes in the run's next output."""
        self.token_ids += later.token_ids
        self.pieces += later.pieces
        self.logprobs += later.logprobs
        self.last_s, self.paused_s = later.last_s, later.paused_s
        self.cached_tokens = later.cached_tokens if self.cached_tokens is None else self.cached_tokens
        self.finish, self.failure = later.finish, later.failure


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine's present state. KV figures are in tokens of the active model, 0 without one. `batch_max`: most runs in one step.
    `offloaded`: runs of any model with their KV in host memory or on the way there. `host_kv_*_tokens`: of all offloaded runs; the capacity
    is 0 if the engine cannot offload. `host_memory_*_bytes`: weights of warm models and offloaded KV together; 0 if unknown. `others_*`:
    load of other clients of its server, which `running` and `kv_used_tokens` include; 0 on a server that is not shared."""

    active_model: str
    warm_models: tuple[str, ...]
    running: int
    waiting: int
    batch_max: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    preemptions: int
    offloaded: int = 0
    host_kv_used_tokens: int = 0
    host_kv_capacity_tokens: int = 0
    host_memory_used_bytes: int = 0
    host_memory_capacity_bytes: int = 0
    others_runs: int = 0
    others_kv_tokens: int = 0


class EngineBusy(PreconditionFailed):
    """The active model cannot be replaced while it has runs on the GPU."""

    default_reason = "MODEL_BUSY"


class ModelLoadFailed(PreconditionFailed):
    """A model cannot be brought to the requested tier: unknown, too big, or the load failed."""

    default_reason = "MODEL_BUSY"


class Engine(Protocol):
    """One engine slot. `start` and `stop` are safe unstarted and twice."""

    @property
    def text_output(self) -> bool:
        """Its output is pieces of text, not token ids."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Ends all runs without outputs."""

    def tier(self, model: str) -> Tier: ...

    async def load_model(self, model: str, tier: Tier) -> float:
        """Brings a model to a tier and returns the seconds it took. ACTIVE moves the active model to WARM, or to COLD if host memory does
        not hold it; other models may become COLD to make room. WARM runs beside other work. COLD, and WARM of the active model, require
        that it has no runs on the GPU; offloaded runs stay in any case. Raises EngineBusy, ModelLoadFailed; then tiers are unchanged."""

    async def add(self, request: EngineRequest) -> None:
        """Takes a run of the active model. A run that cannot be served gives an output with a failure, not an exception."""

    async def abort(self, run_ids: Sequence[str]) -> None:
        """Ends runs, offloaded ones too, without further output; unknown ones are ignored. Unread output is dropped."""

    async def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        """Moves the KV of runs to host memory and returns the runs that were moved; the others continue unchanged: unknown, ended, waiting
        or prefilling, or host memory is full. From the call on an offloaded run makes no output, and its earlier output is still reported;
        its KV on the GPU is free when this returns. It keeps its host memory until `restore` or `abort`, over any change of models."""

    async def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        """Moves offloaded runs of the active model back to the GPU and returns those moved; they continue exactly, without computing
        anything again. From the call on they count as running. The others stay offloaded: of another model, no seat or no KV free."""

    async def outputs(self) -> Sequence[EngineOutput]:
        """Waits for output and returns all of it: the first and the last of a run as soon as it is made. Empty if the engine has changed
        without output: it lost its active model by itself (`stats` then reports none until the next load), or other clients' load
        changed."""

    async def pause(self) -> None:
        """Stops generating; runs stay. Safe twice."""

    async def resume(self) -> None:
        """Resumes after `pause`. Safe twice."""

    def stats(self) -> EngineStats: ...
