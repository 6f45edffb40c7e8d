"""The engine port: what an agent needs of whatever generates tokens. Simulated, vLLM and OpenAI-compatible engines stand behind it,
and `tests/conformance/engine` says the same in code.

- Times are seconds of `time.monotonic()`, the engine's clock.
- A run is one attempt of one request. The agent chooses its `run_id`; it is never used twice.
- Output is either token ids or, from engines that tell only text, pieces; one engine gives always the same kind for a model.
- Outputs of a run are in order and without gaps, and go on after what was produced already. After `abort` returned there are no more.
- Where a run asks for logprobs each token id comes with a record of `qlm_agent.delivery.logprobs`; text engines refuse such runs.
- A run is on the GPU (it waits, prefills or decodes) or offloaded: its KV is in host memory and waits there for `restore`.
- One task reads `outputs`; the other methods may be called meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol

from qlm_core.chat import ChatPrompt
from qlm_core.errors import PreconditionFailed


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
    AWAY = "away"  # the engine serves nobody, or was never asked: no attempt of the request


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
        """Whether prompt + produced tokens are enough to go on faithfully after an abort."""
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty not in (None, 1.0)
        return self.seed is None and not penalised and not self.json_schema and not self.regex


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One run. `produced`: output of earlier attempts, token ids as little-endian uint32; `produced_pieces`: the same from an engine that
    tells only text. `output_tokens_max` counts that too and is greater. `prompt_tokens`: as counted at the gateway. `arrival` (0:
    the engine counts), `deadline_s` (engine's clock, infinite for none) and `priority` (lower first) are for the engine's policy."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailure:
    """Why a run failed; `message` is for people."""

    kind: FailureKind
    message: str


@dataclass(slots=True)
class EngineOutput:
    """New output of a run, made from `first_s` to `last_s`; it may be empty where the run ends. `started_s`: when the engine began with the
    run. `logprobs`: a record for each token, where they are asked for. At most one of `finish` and `failure` is set, on the last output of
    a run. (Not frozen, since it is made for each token.)"""

    run_id: str
    token_ids: bytes
    started_s: float
    first_s: float
    last_s: float
    pieces: tuple[str, ...] = ()
    logprobs: bytes = b""
    finish: FinishReason | None = None
    failure: EngineFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine now. KV figures are in tokens of the active model, 0 without one. `batch_max`: most runs in one step. `offloaded`: runs of
    any model with their KV in host memory or on the way there. `host_kv_*_tokens`: of all offloaded runs; the capacity is 0 where the
    engine cannot offload. `host_memory_*_bytes`: weights of warm models and offloaded KV together; 0 where the engine does not tell.
    `others_*`: what other clients of its server hold, which `running` and `kv_used_tokens` count too; 0 where nobody shares it."""

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
    """A model cannot be brought to the tier asked for: unknown, too big, or the load failed."""

    default_reason = "MODEL_BUSY"


class Engine(Protocol):
    """One engine slot. `start` and `stop` are safe unstarted and twice."""

    @property
    def tells_text(self) -> bool:
        """Its output is pieces of text, not token ids."""

    async def start(self) -> None: ...

    async def stop(self) -> None:
        """Ends all runs without outputs."""

    def tier(self, model: str) -> Tier: ...

    async def load_model(self, model: str, tier: Tier) -> float:
        """Brings a model to a tier and returns the seconds it took. ACTIVE puts the active model back to WARM, or to COLD where host memory
        does not hold it; other models may become COLD to make room. WARM goes on beside running work. COLD, and WARM of the active
        model, end its runs' chances, so they need that it has none on the GPU; offloaded runs stay whatever is loaded. Raises EngineBusy,
        ModelLoadFailed; then tiers are as before."""

    async def add(self, request: EngineRequest) -> None:
        """Takes a run of the active model. A run that cannot be served gives an output with a failure, not an exception."""

    async def abort(self, run_ids: Sequence[str]) -> None:
        """Ends runs, offloaded ones too, without further output; unknown ones are ignored. What was made but not yet read is dropped."""

    async def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        """Moves the KV of runs to host memory and returns whose is there now; the others go on as they were: unknown, ended, waiting or
        prefilling, or host memory is full. From the call on an offloaded run makes no output, and what it made before is still told; its
        KV on the GPU is free when this returns. It keeps its host memory until `restore` or `abort`, over any change of models."""

    async def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        """Brings offloaded runs of the active model back and returns those that are; they go on exactly where they were, without computing
        anything again. From the call on they count as running. The others stay offloaded: of another model, no seat or no KV free."""

    async def outputs(self) -> Sequence[EngineOutput]:
        """Waits for output and returns all there is: the first and the last of a run as soon as it is made. Empty where nothing was made
        but the engine has changed: it lost its active model by itself, of which `stats` then tells none until one is loaded; or other
        clients of its server hold more or less than before."""

    async def pause(self) -> None:
        """Stops generating; runs stay. Safe twice."""

    async def resume(self) -> None:
        """Goes on after `pause`. Safe twice."""

    def stats(self) -> EngineStats: ...
