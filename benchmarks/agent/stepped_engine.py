"""A vLLM engine in this process that the bench steps itself, so that only the engine is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.agent.model_config import made_up_prompt
from benchmarks.agent.own_agent import GreedyRequest
from benchmarks.agent.parts import Plan
from qlm_agent.engines.vllm.plans import LEAST_UTILIZATION, environment
from qlm_agent.engines.vllm.settings import VllmSettings

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
QLM_SCHEDULER = "qlm_agent.engines.vllm.scheduler.scheduler.QlmScheduler"
STEPS_MAX = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Properties of the engine. `scheduler`: "qlm", or vLLM's own with the policy "fcfs" or "priority"."""

    model: Path
    dtype: str
    seats: int
    context_tokens: int = 1024
    gpu_kv_bytes: int = 512 << 20
    host_kv_bytes: int = 0
    scheduler: str = "qlm"
    prefill_chunk_tokens: int = 2048

    @classmethod
    def of(cls, plan: Plan, seats: int, **more: Any) -> EnginePlan:
        return cls(model=plan.model, dtype=plan.dtype, seats=seats, **more)


class SteppedEngine:
    """Greedy runs over invented prompts that make exactly the given number of tokens."""

    def __init__(self, plan: EnginePlan) -> None:
        os.environ.update(ENVIRONMENT)
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        from qlm_agent.engines.vllm.runner.llm_engine import offloading_config

        settings: dict[str, Any] = {"scheduling_policy": plan.scheduler}
        if plan.scheduler == "qlm":
            settings = {"scheduler_cls": QLM_SCHEDULER, **offloading_config(plan.host_kv_bytes)}
        if not current_platform.is_cpu():
            settings["gpu_memory_utilization"] = LEAST_UTILIZATION  # an agent's engine may be on the same GPU
        args = EngineArgs(
            model=str(plan.model),
            dtype=plan.dtype,
            max_model_len=plan.context_tokens,
            max_num_seqs=plan.seats,
            max_num_batched_tokens=plan.prefill_chunk_tokens,
            kv_cache_memory_bytes=plan.gpu_kv_bytes,
            block_size=32,
            skip_tokenizer_init=True,
            async_scheduling=False,
            enforce_eager=current_platform.is_cpu(),  # compiling takes minutes there
            seed=0,
            **settings,
        )
        self._engine: Any = LLMEngine.from_engine_args(args)
        self._vocabulary = self._engine.model_config.get_vocab_size()
        self._ids: dict[str, str] = {}
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        self.produced: dict[str, int] = {}
        self.running: set[str] = set()
        """All runs that have not ended."""

    def prompt(self, number: int, tokens: int) -> list[int]:
        """Prompts of different numbers differ."""
        return made_up_prompt(self._vocabulary, number, tokens)

    def add(self, run_id: str, prompt: list[int], answer: int, *, priority: int = 0, **urgency: float) -> None:
        """`urgency`: further facts of the request for QLM's scheduler (`RequestUrgency`)."""
        from vllm import SamplingParams

        extra = {"qlm": {"run_id": run_id, "priority": priority, **urgency}}
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False, extra_args=extra)
        self._ids[run_id] = self._engine.add_request(run_id, {"prompt_token_ids": prompt}, params, priority=priority)
        self.produced[run_id] = 0
        self.running.add(run_id)

    def abort(self, run_id: str) -> None:
        self._engine.abort_request([self._ids.pop(run_id)], internal=True)
        self.running.discard(run_id)

    def step(self) -> None:
        for output in self._engine.step():
            self.produced[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                self.running.discard(output.request_id)

    def timed_step(self) -> float:
        """Makes a step; returns the seconds."""
        began_s = time.perf_counter()
        self.step()
        return time.perf_counter() - began_s

    def until(self, done: Callable[[], bool]) -> float:
        """Steps until `done`; returns the seconds."""
        began_s = time.perf_counter()
        for _ in range(STEPS_MAX):
            if done():
                return time.perf_counter() - began_s
            self.step()
        raise AssertionError(f"not done after {STEPS_MAX} steps")

    def clear(self) -> None:
        """Ends all runs and forgets their prefixes."""
        for run_id in tuple(self.running):
            self.abort(run_id)
        while self.scheduler.has_requests():
            self.step()
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        self._engine.reset_prefix_cache()


@cache
def _engine_of(plan: EnginePlan) -> SteppedEngine:
    """One a process, in the environment of an agent's engine."""
    os.environ.update(environment(VllmSettings()))
    return SteppedEngine(plan)


def seconds_for(plan: EnginePlan, requests: Sequence[GreedyRequest]) -> float:
    """Seconds from the submission of the first of them, all at once, to the last one's last token, on the engine of this process."""
    engine = _engine_of(plan)
    engine.clear()
    began_s = time.perf_counter()
    for number, each in enumerate(requests):
        engine.add(f"bare-{number}", list(each.prompt), each.output_tokens)
    engine.until(lambda: not engine.running)
    return time.perf_counter() - began_s
