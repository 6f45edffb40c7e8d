"""The engine of an engine process: vLLM in this process or through AsyncLLM, behind one small interface, and the record of its runs."""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qlm_agent.delivery.logprobs import Records
from qlm_agent.delivery.stop_strings import TokenStops
from qlm_agent.engines.port import FailureKind, FinishReason, TextPrompt
from qlm_core.chat import ChatPrompt

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
    """A process of vLLM's own has ended, and with it the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load of a process. `engine`: arguments of vllm.EngineArgs. `context_tokens`: of the model; the engine's own `max_model_len` is
    less if KV holds less. `weights`: its folder. `host_kv_bytes`: 0 to never offload. `policy`: dotted name of the order inside the engine,
    "" for its default, made with `policy_options`. `device_bytes`: least bytes of weights and KV on one device. `asynchronous`: through
    AsyncLLM; `async_scheduling`: vLLM schedules a step while the last one is under way; `forks`: AsyncLLM's processes are forked and import
    nothing anew."""

    weights: str
    engine: dict[str, Any]
    context_tokens: int
    kv_bytes_per_token: int
    chat_template: str = ""
    host_kv_bytes: int = 0
    policy: str = ""
    policy_options: dict[str, Any] = field(default_factory=dict)
    device_bytes: int = 0
    asynchronous: bool = False
    async_scheduling: bool = False
    forks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """One run: the prompt's tokens, tokens of earlier attempts, and sampling parameters by the names of
    `qlm_agent.engines.port.Sampling`."""

    run_id: str
    prompt: list[int]
    produced: list[int]
    output_tokens_max: int
    sampling: dict[str, Any]
    policy: dict[str, Any]


@dataclass(slots=True)
class RunOutput:
    """New output of a run. `logprobs`: a record for each token, if the run wants them."""

    run_id: str
    tokens: list[int]
    started_s: float
    first_s: float
    last_s: float
    finish: str = ""
    failure: str = ""
    message: str = ""
    logprobs: bytes = b""


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
    steps: int  # of vLLM so far
    check_every_s: float | None  # how often to call `check` while nothing happens, None for never

    @property
    def busy(self) -> bool:
        """Steps would do something."""

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
        """Makes a step, or waits a moment for one that vLLM makes by itself."""

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


@dataclass(slots=True)
class _Run:
    plan: RunPlan
    made: int
    stop: TokenStops | None = None
    records: Records | None = None


@dataclass
class Runs:
    """The runs of a runner: admission of each, and its end."""

    runner: Runner
    context_tokens: int
    _runs: dict[str, _Run] = field(default_factory=dict)

    def add(self, now_s: float, plan: RunPlan) -> RunOutput | None:
        """Begins a run, or returns its end at once."""
        at = (now_s, now_s, now_s)
        prompt, produced, sampling = len(plan.prompt), len(plan.produced), plan.sampling
        if not prompt or prompt >= self.context_tokens:
            why = (
                f"a prompt of {prompt} tokens leaves no room in a context of {self.context_tokens}"
                if prompt
                else "the prompt has no tokens"
            )
            return RunOutput(plan.run_id, [], *at, failure=FailureKind.REFUSED.value, message=why)
        left = min(plan.output_tokens_max - produced, self.context_tokens - prompt - produced)
        if left <= 0:
            # An earlier attempt produced all of it and ended before the report.
            return RunOutput(plan.run_id, [], *at, finish=FinishReason.LENGTH.value)
        if produced and plan.produced[-1] in self.runner.eos_ids and not sampling.get("ignore_eos"):
            return RunOutput(plan.run_id, [], *at, finish=FinishReason.STOP.value)
        if prompt + produced >= self.runner.kv_limit_tokens:
            return RunOutput(plan.run_id, [], *at, failure=FailureKind.KV_CAPACITY.value, message=self._too_long(prompt + produced))
        stop = TokenStops(sampling["stop"], self.runner.text_of([*plan.prompt, *plan.produced])) if sampling.get("stop") else None
        try:
            self.runner.add(plan, left)
        except Exception as error:  # any error of vLLM's checks; it has not taken the run
            return RunOutput(plan.run_id, [], *at, failure=FailureKind.REFUSED.value, message=str(error))
        records = Records(sampling["logprobs"]) if "logprobs" in sampling else None
        self._runs[plan.run_id] = _Run(plan, produced, stop, records)
        return None

    def abort(self, run_ids: Sequence[str]) -> None:
        known = [run_id for run_id in run_ids if self._runs.pop(run_id, None) is not None]
        if known:
            self.runner.abort(known)

    def knows(self, run_id: str) -> bool:
        """It has neither ended nor been aborted."""
        return run_id in self._runs

    def step(self) -> list[RunOutput]:
        """Makes one step and returns the output to report."""
        released = []
        for made in self.runner.step():
            run = self._runs.get(made.run_id)
            if run is None:
                continue
            run.made += len(made.tokens)
            self._cut(run, made)
            if run.records is not None:
                run.records.add(made.logprobs)
                made.logprobs = run.records.take(len(made.tokens))
            if made.finish or made.failure:
                del self._runs[made.run_id]
            if made.tokens or made.finish or made.failure:
                released.append(made)
        return released

    def _cut(self, run: _Run, made: RunOutput) -> None:
        """Ends output before a stop string, and marks an end for want of KV."""
        if run.stop is not None:
            tokens, stopped = run.stop.feed(made.tokens)
            if stopped:
                if not made.finish:
                    self.runner.abort([made.run_id])
                made.finish, made.failure, made.message = FinishReason.STOP.value, "", ""
            elif made.finish or made.failure not in ("", FailureKind.BROKEN.value):
                tokens += run.stop.flush()  # but not for another attempt: it makes them again, and matches a stop string in them
            made.tokens = tokens
        if made.finish == FinishReason.LENGTH.value:
            plan = run.plan
            total = len(plan.prompt) + run.made
            if run.made < plan.output_tokens_max and total < self.context_tokens and total >= self.runner.kv_limit_tokens:
                made.finish, made.failure, made.message = "", FailureKind.KV_CAPACITY.value, self._too_long(total)

    def _too_long(self, tokens: int) -> str:
        return f"a run of {tokens} tokens needs more than the {self.runner.kv_limit_tokens} tokens of KV that there are"


def kv_limit_tokens(context_tokens: int, kv_bytes: int, kv_bytes_per_token: int, block_size: int) -> int:
    """The longest run: of the context, or of the KV beside the block that vLLM keeps for itself."""
    blocks = kv_bytes // (kv_bytes_per_token * block_size) - 1
    return min(context_tokens, max(0, math.floor(blocks)) * block_size)
