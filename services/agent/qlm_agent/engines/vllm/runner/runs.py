"""The record of an engine process's runs: admission of each, and its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from qlm_agent.delivery.logprobs import Records
from qlm_agent.delivery.stop_strings import TokenStops
from qlm_agent.engines.port import FailureKind, FinishReason
from qlm_agent.engines.vllm.runner.port import Runner, RunOutput, RunPlan


@dataclass(slots=True)
class _Run:
    plan: RunPlan
    made: int
    stop: TokenStops | None = None
    records: Records | None = None


@dataclass
class Runs:
    """The runs of a runner."""

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
