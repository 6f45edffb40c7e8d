"""vLLM's AsyncLLM as a runner: its processes do the steps, and a thread of this one reads their output.

KV swap uses utility calls to QLM's scheduler, which is in a process of vLLM's (`scheduler.calls`). A call takes until the end of the step
under way. Output of a run from before its offload arrives apart from the answers: the run counts as away once all of it was reported.
"""

from __future__ import annotations

import asyncio
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any

from qlm_agent.engines.port import FailureKind, TextPrompt
from qlm_agent.engines.vllm.runners.in_process import FINISHES, engine_arguments, records_of, sampling_params
from qlm_agent.engines.vllm.runners.prompts import ModelText
from qlm_agent.engines.vllm.runners.runner import LoadPlan, RunnerStats, RunOutput, RunPlan, VllmProcessEnded
from qlm_agent.engines.vllm.runners.sleeping import SleepingModel, WorkerProbe
from qlm_core.chat import ChatPrompt

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
CHECK_EVERY_S = 1.0
"""How often an idle engine is checked: vLLM notices the end of its processes, and reports it only on a call."""

WAIT_S = 0.005
"""How long one `step` waits for output; messages of the agent wait as long."""


class AsyncRunner:
    """See `qlm_agent.engines.vllm.runners.runner.Runner`."""

    check_every_s: float | None = CHECK_EVERY_S

    def __init__(self, plan: LoadPlan) -> None:
        self.steps = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="async-llm", daemon=True).start()
        self._outputs: queue.SimpleQueue[RunOutput] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._received: dict[str, int] = {}  # tokens received of runs that are with vLLM
        self._leaving: set[str] = set()  # runs whose KV is on the way to host memory
        self._swap: dict[str, Any] = {"away": {}, "leaving": [], "used": 0, "capacity": 0, "moving": False}
        self._swap_changes = False  # the known state of KV in host memory may be stale
        self._running = self._waiting = self._waiting_max = self._preemptions = 0
        self._kv_usage = 0.0
        self._plan = plan
        self._engine: Any = self._do(self._build(plan))
        config = self._engine.vllm_config
        blocks = config.cache_config.num_gpu_blocks or 1
        self._kv_capacity_tokens = (blocks - 1) * config.cache_config.block_size
        self.kv_limit_tokens: int = config.model_config.max_model_len
        self._defaults: dict[str, Any] = config.model_config.get_diff_sampling_param()
        self._text = ModelText(Path(plan.weights), self._engine.get_tokenizer().eos_token_id, plan.chat_template)
        self.eos_ids = self._text.eos_ids
        self._weights = plan.weights
        if plan.host_kv_bytes:
            self._swap = self._call("qlm_swap_state")
        engine = _BlockingEngine(self._engine, self._do)
        self._sleeping = SleepingModel(engine, WorkerProbe(engine), expected_bytes=plan.device_bytes)

    async def _build(self, plan: LoadPlan) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = AsyncEngineArgs(**{**engine_arguments(plan), "disable_log_stats": False}).create_engine_config()
        if plan.forks:
            # On CPUs vLLM has just requested fresh processes, for threads that it would bind to cores. None are bound here, and this
            # process has all their imports: two seconds instead of fifteen.
            os.environ[START_METHOD] = "fork"
        return AsyncLLM.from_vllm_config(config, stat_loggers=[self._logger()])

    def _logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        runner = self

        class Listening(StatLoggerBase):
            """Called after each step."""

            def __init__(self, *arguments: Any, **named: Any) -> None:
                """Takes no arguments of its own."""

            def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *rest: Any, **named: Any) -> None:
                runner._stepped(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        return Listening

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def check(self) -> None:
        if self._engine.errored:
            raise VllmProcessEnded("a process of vLLM's own has ended")

    def text_prompt(self, prompt: TextPrompt) -> list[int]:
        return self._text.text_prompt(prompt)

    def chat_prompt(self, prompt: ChatPrompt) -> list[int]:
        return self._text.chat_prompt(prompt)

    def text_of(self, before: Sequence[int]) -> Callable[[int], str | None]:
        return self._text.text_of(before)

    def add(self, plan: RunPlan, output_tokens: int) -> None:
        params = sampling_params(plan.sampling, output_tokens, self._defaults, {**plan.policy, "run_id": plan.run_id})
        self._received[plan.run_id] = 0
        self._tasks[plan.run_id] = self._do(self._begin(plan, params))

    def abort(self, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            task = self._forget(run_id)
            if task is not None:
                self._do(self._cancel(task))  # and so aborts it in vLLM
        if self._swap_changes:
            self._refresh_swap_state()

    def step(self) -> list[RunOutput]:
        made: list[RunOutput] = []
        try:
            made.append(self._outputs.get(timeout=WAIT_S))
            while True:
                made.append(self._outputs.get_nowait())
        except queue.Empty:
            pass
        for each in made:
            if each.run_id in self._received:
                self._received[each.run_id] += len(each.tokens)
            if each.finish or each.failure:
                self._forget(each.run_id)
        if self._swap_changes:
            self._refresh_swap_state()
        return made

    def pause(self, paused: bool) -> None:
        # Clearing caches, vLLM's default, preempts all that runs.
        self._do(self._engine.pause_generation(mode="keep", clear_cache=False) if paused else self._engine.resume_generation())

    def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        if not self._swap["capacity"]:
            return []
        leaving: list[str] = self._call("qlm_offload", [run_id for run_id in run_ids if run_id in self._tasks])
        self._leaving.update(leaving)
        self._refresh_swap_state()
        return leaving

    def offloaded(self) -> Collection[str]:
        return [run_id for run_id, tokens in self._swap["away"].items() if self._received.get(run_id, tokens) >= tokens]

    def leaving(self) -> Collection[str]:
        return self._leaving | (self._swap["away"].keys() - set(self.offloaded()))

    def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        if not self._swap["capacity"]:
            return []
        back: list[str] = self._call("qlm_restore", list(run_ids))
        self._refresh_swap_state()
        return back

    def reload(self, weights: str) -> None:
        self._do(self._engine.collective_rpc("reload_weights", kwargs={"weights_path": weights}))
        self._weights = weights
        self._do(self._engine.reset_prefix_cache())

    def sleep(self, level: int) -> None:
        self._sleeping.sleep(level)

    def wake(self, level: int) -> None:
        self._sleeping.wake(level, self._weights)

    def trim(self) -> None:
        self._sleeping.give_back()

    def stats(self) -> RunnerStats:
        return RunnerStats(
            running=self._running,
            waiting=self._waiting,
            kv_used_tokens=math.ceil(self._kv_usage * self._kv_capacity_tokens) if self._tasks else 0,
            kv_capacity_tokens=self._kv_capacity_tokens,
            preemptions=self._preemptions,
            waiting_max=self._waiting_max,
            host_kv_used_tokens=self._swap["used"],
            host_kv_capacity_tokens=self._swap["capacity"],
            kv_bytes_per_token=self._plan.kv_bytes_per_token,
        )

    def close(self) -> None:
        self._engine.shutdown()

    # In the thread ----------------------------------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _call(self, name: str, *arguments: Any) -> Any:
        """A utility call to QLM's scheduler."""
        return self._do(self._engine.engine_core.call_utility_async(name, *arguments))

    def _refresh_swap_state(self) -> None:
        self._swap = self._call("qlm_swap_state")
        self._leaving = {run_id for run_id in self._leaving if run_id in self._tasks and run_id in self._swap["leaving"]}
        self._swap_changes = self._swap["moving"] or bool(self._leaving)

    def _forget(self, run_id: str) -> asyncio.Task[None] | None:
        self._received.pop(run_id, None)
        self._leaving.discard(run_id)
        if run_id in self._swap["away"]:
            self._swap_changes = True
        return self._tasks.pop(run_id, None)

    async def _begin(self, plan: RunPlan, params: Any) -> asyncio.Task[None]:
        return asyncio.create_task(self._follow(plan, params))

    async def _cancel(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.wait([task])

    async def _follow(self, plan: RunPlan, params: Any) -> None:
        """Reads one run to its end."""
        started_s = added_s = time.monotonic()
        prompt = {"prompt_token_ids": [*plan.prompt, *plan.produced]}
        try:
            async for output in self._engine.generate(prompt, params, plan.run_id):
                now_s = time.monotonic()
                if output.metrics is not None and added_s <= output.metrics.scheduled_ts <= now_s:
                    started_s = output.metrics.scheduled_ts
                completion = output.outputs[0]
                made = RunOutput(plan.run_id, list(completion.token_ids), started_s, now_s, now_s)
                made.logprobs = records_of(completion, params)
                if output.finished:
                    made.finish = FINISHES.get(completion.finish_reason or "", "")
                    if not made.finish:
                        made.failure, made.message = FailureKind.BROKEN.value, f"vLLM ended the run: {completion.finish_reason}"
                self._outputs.put(made)
        except Exception as error:  # errors of vLLM's checks, or of its processes
            dead = getattr(self._engine, "errored", False)
            kind = FailureKind.BROKEN if dead else FailureKind.REFUSED
            now_s = time.monotonic()
            self._outputs.put(
                RunOutput(plan.run_id, [], started_s, now_s, now_s, failure=kind.value, message=f"{type(error).__name__}: {error}")
            )

    def _stepped(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        self.steps += 1
        if scheduler_stats is not None:
            self._running, self._waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            self._kv_usage = scheduler_stats.kv_cache_usage
            self._waiting_max = max(self._waiting_max, self._waiting)
        if iteration_stats is not None:
            self._preemptions += iteration_stats.num_preempted_reqs


class _BlockingEngine:
    """The calls of `SleepingModel`, on an engine whose methods are coroutines."""

    def __init__(self, engine: Any, do: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._engine = engine
        self._do = do

    def sleep(self, level: int, mode: str) -> None:
        self._do(self._engine.sleep(level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._do(self._engine.wake_up(tags))

    def is_sleeping(self) -> bool:
        return bool(self._do(self._engine.is_sleeping()))

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> Any:
        return self._do(self._engine.collective_rpc(method, kwargs=kwargs))
