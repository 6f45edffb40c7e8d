"""The engine of an engine process behind a small interface, so that the process is tested without vLLM."""

from __future__ import annotations

import array
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qlm_agent.engines.port import TextPrompt
from qlm_core.vocabulary.chat import ChatPrompt

TOKEN_TYPE = "I"  # four bytes on all platforms that vLLM has


def ids_of(data: bytes) -> list[int]:
    """Token ids from little-endian uint32."""
    values = array.array(TOKEN_TYPE, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def bytes_of(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    values = array.array(TOKEN_TYPE, ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


class VllmProcessEnded(RuntimeError):
    """A worker process of vLLM's has ended, and with it the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load of a process. `engine`: arguments of vllm.EngineArgs. `context_tokens`: of the model; the engine's own `max_model_len` is
    less if KV holds less. `weights`: its folder. `host_kv_bytes`: 0 to never offload. `policy`: name of the policy inside the engine,
    "" for its default, made with `policy_options`. `device_bytes`: least bytes of weights and KV on one device."""

    weights: str
    engine: dict[str, Any]
    context_tokens: int
    kv_bytes_per_token: int
    chat_template: str = ""
    host_kv_bytes: int = 0
    policy: str = ""
    policy_options: dict[str, Any] = field(default_factory=dict)
    device_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run: the prompt's tokens, tokens of earlier attempts, and sampling parameters that are not the defaults, by the names of
    `qlm_agent.engines.port.Sampling`."""

    run_id: str
    prompt: list[int]
    produced: list[int]
    output_tokens_max: int
    sampling: dict[str, Any]
    policy: dict[str, Any]


@dataclass(slots=True)
class RunOutput:
    """New output of a run. `logprobs`: a record for each token, if the run wants them. `cached_tokens`: see `EngineOutput`."""

    run_id: str
    tokens: list[int]
    started_s: float
    first_s: float
    last_s: float
    finish: str = ""
    failure: str = ""
    message: str = ""
    logprobs: bytes = b""
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerStats:
    """As of the last step. `waiting_max`: most that waited after any step."""

    running: int
    waiting: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    preemptions: int
    waiting_max: int = 0
    host_kv_used_tokens: int = 0
    host_kv_capacity_tokens: int = 0
    kv_bytes_per_token: int = 0


class Runner(Protocol):
    """vLLM with one model. Methods raise vLLM's errors."""

    kv_limit_tokens: int  # of one run, prompt and output
    eos_ids: frozenset[int]

    @property
    def busy(self) -> bool:
        """Steps would do something: generate, or move KV in a pause."""

    def check(self) -> None:
        """Raises VllmProcessEnded if it can never serve again."""

    def text_prompt(self, prompt: TextPrompt) -> list[int]: ...

    def chat_prompt(self, prompt: ChatPrompt) -> list[int]: ...

    def text_of(self, before: Sequence[int]) -> Callable[[int], str | None]:
        """The text that tokens add, one after the other."""

    def add(self, plan: RunPlan, output_tokens: int) -> None:
        """Begins a run that makes at most so many tokens. Raises ValueError for one that it does not take."""

    def abort(self, run_ids: Sequence[str]) -> None: ...

    def step(self) -> list[RunOutput]:
        """Makes a step and returns the output of the one that ended, which may be the one before."""

    def pause(self, paused: bool) -> None:
        """While it is paused, steps move KV and generate nothing."""

    def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        """Takes runs out of the batch and returns them; steps copy their KV."""

    def offloaded(self) -> Collection[str]:
        """Runs with their KV in host memory."""

    def leaving(self) -> Collection[str]:
        """Runs with their KV on the way there; one that is in neither set and was not aborted continues unchanged."""

    def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        """Returns the runs that are back in the batch."""

    def reload(self, weights: str) -> None:
        """Other weights in the place of its own."""

    def sleep(self, level: int) -> None:
        """Frees the device's memory. Raises as `sleeping` does."""

    def wake(self, level: int) -> None: ...

    def trim(self) -> None:
        """Gives back host memory that the last wake left with the process."""

    def stats(self) -> RunnerStats: ...

    def close(self) -> None: ...
