"""What an engine process runs: vLLM in this process or through AsyncLLM, behind one small interface, and the record of its runs."""

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


class EngineGone(RuntimeError):
    """A process of vLLM's own has ended, and with it the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a process is to load. `engine`: arguments of vllm.EngineArgs. `context_tokens`: of the model; the engine's own `max_model_len`
    is less where KV holds less. `weights`: its folder. `host_kv_bytes`: 0 to never offload. `policy`: dotted name of the order inside the
    engine, "" for its default, made with `policy_options`. `device_bytes`: what weights and KV take on one device at the least.
    `asynchronous`: through AsyncLLM; `async_scheduling`: vLLM schedules a step while the one before is under way; `forks`: AsyncLLM's
    processes are forked and import nothing anew."""

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
    """One run: the prompt's tokens, those produced before, and sampling parameters by the names of `qlm_agent.engines.port.Sampling`."""

    run_id: str
    prompt: list[int]
    produced: list[int]
    output_tokens_max: int
    sampling: dict[str, Any]
    policy: dict[str, Any]


@dataclass(slots=True)
class Made:
    """New output of a run. `logprobs`: a record for each token, where the run asks for them."""

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
    """vLLM with one model. Methods raise what vLLM raises."""

    kv_limit_tokens: int  # of one run, prompt and output
    eos_ids: frozenset[int]
    steps: int  # that vLLM has made
    look_every_s: float | None  # how often `check` is to be asked while nothing happens, None for not at all

    @property
    def busy(self) -> bool:
        """Steps would do something."""

    def check(self) -> None:
        """Raises EngineGone where it can never serve again."""

    def text_prompt(self, prompt: TextPrompt) -> list[int]: ...

    def chat_prompt(self, prompt: ChatPrompt) -> list[int]: ...

    def text_of(self, before: Sequence[int]) -> Callable[[int], str | None]:
        """What tokens add to a text, one after the other."""

    def add(self, plan: RunPlan, output_tokens: int) -> None:
        """Begins a run that makes at most so many tokens. Raises ValueError for one that it does not take."""

    def abort(self, run_ids: Sequence[str]) -> None: ...

    def step(self) -> list[Made]:
        """Makes a step, or waits a moment for one that vLLM makes by itself."""

    def pause(self, paused: bool) -> None:
        """While it is paused, steps move KV and generate nothing."""

    def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        """Those that leave the batch; steps copy their KV."""

    def offloaded(self) -> Collection[str]:
        """Whose KV is in host memory."""

    def leaving(self) -> Collection[str]:
        """Whose KV is on the way there; those that neither are nor were aborted go on as they were."""

    def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        """Those that are back in the batch."""

    def reload(self, weights: str) -> None:
        """Other weights in the place of its own."""

    def sleep(self, level: int) -> None:
        """Gives the device's memory back. Raises what `sleeping` says."""

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
    """The runs of a runner: which can be served, and where each of them ends."""

    runner: Runner
    context_tokens: int
    _runs: dict[str, _Run] = field(default_factory=dict)

    def add(self, now_s: float, plan: RunPlan) -> Made | None:
        """Begins a run, or says at once how it ends."""
        at = (now_s, now_s, now_s)
        prompt, produced, sampling = len(plan.prompt), len(plan.produced), plan.sampling
        if not prompt or prompt >= self.context_tokens:
            why = (
                f"a prompt of {prompt} tokens leaves no room in a context of {self.context_tokens}"
                if prompt
                else "the prompt has no tokens"
            )
            return Made(plan.run_id, [], *at, failure=FailureKind.REFUSED.value, message=why)
        left = min(plan.output_tokens_max - produced, self.context_tokens - prompt - produced)
        if left <= 0:
            # An earlier attempt made all of it and was lost before it could say so.
            return Made(plan.run_id, [], *at, finish=FinishReason.LENGTH.value)
        if produced and plan.produced[-1] in self.runner.eos_ids and not sampling.get("ignore_eos"):
            return Made(plan.run_id, [], *at, finish=FinishReason.STOP.value)
        if prompt + produced >= self.runner.kv_limit_tokens:
            return Made(plan.run_id, [], *at, failure=FailureKind.KV_CAPACITY.value, message=self._too_long(prompt + produced))
        stop = TokenStops(sampling["stop"], self.runner.text_of([*plan.prompt, *plan.produced])) if sampling.get("stop") else None
        try:
            self.runner.add(plan, left)
        except Exception as error:  # whatever vLLM checks requests with; it has not taken the run
            return Made(plan.run_id, [], *at, failure=FailureKind.REFUSED.value, message=str(error))
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

    def step(self) -> list[Made]:
        """What one step of the runner made that may be told."""
        told = []
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
                told.append(made)
        return told

    def _cut(self, run: _Run, made: Made) -> None:
        """Ends output before a stop string, and tells an end that is for want of KV from others."""
        if run.stop is not None:
            tokens, stopped = run.stop.feed(made.tokens)
            if stopped:
                if not made.finish:
                    self.runner.abort([made.run_id])
                made.finish, made.failure, made.message = FinishReason.STOP.value, "", ""
            elif made.finish or made.failure not in ("", FailureKind.BROKEN.value):
                tokens += run.stop.flush()  # but not where another attempt goes on: it makes them again, and finds a stop string in them
            made.tokens = tokens
        if made.finish == FinishReason.LENGTH.value:
            plan = run.plan
            total = len(plan.prompt) + run.made
            if run.made < plan.output_tokens_max and total < self.context_tokens and total >= self.runner.kv_limit_tokens:
                made.finish, made.failure, made.message = "", FailureKind.KV_CAPACITY.value, self._too_long(total)

    def _too_long(self, tokens: int) -> str:
        return f"a run of {tokens} tokens needs more than the {self.runner.kv_limit_tokens} tokens of KV that there are"


def kv_limit_tokens(context_tokens: int, kv_bytes: int, kv_bytes_per_token: int, block_size: int) -> int:
    """The longest run: of the context, or of what KV holds beside the block that vLLM keeps for itself."""
    blocks = kv_bytes // (kv_bytes_per_token * block_size) - 1
    return min(context_tokens, max(0, math.floor(blocks)) * block_size)
