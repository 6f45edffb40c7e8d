"""vLLM's LLMEngine in this process, with a process of vLLM's own for each GPU where there are several. One engine a process.

With `async_scheduling` (on GPUs) vLLM schedules a step while the one before is under way, so output is a step late, and a step may still be
under way when nothing is left to schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from qlm_agent.delivery.logprobs import likeliest, record
from qlm_agent.engines.port import FailureKind, FinishReason, TextPrompt
from qlm_agent.engines.vllm.runner.port import LoadPlan, RunnerStats, RunOutput, RunPlan, VllmProcessEnded
from qlm_agent.engines.vllm.runner.prompts import ModelText
from qlm_agent.engines.vllm.runner.sleeping import EXTENSION, SleepingModel
from qlm_core.vocabulary.chat import ChatPrompt


def records_of(completion: Any, sampling: Any) -> bytes:
    """A record for each token of a vllm.CompletionOutput, if the vllm.SamplingParams want them."""
    if sampling.logprobs is None or not completion.token_ids:
        return b""
    made = []
    for token, found in zip(completion.token_ids, completion.logprobs, strict=True):
        top = likeliest(((each, entry.logprob) for each, entry in found.items()), sampling.logprobs)
        made.append(record(found[token].logprob, top))
    return b"".join(made)


FINISHES = {"stop": FinishReason.STOP.value, "length": FinishReason.LENGTH.value, "repetition": FinishReason.STOP.value}
"""vLLM's reasons; others are failures."""


STEPS_UNDER_WAY_MAX = 8
"""vLLM has two under way, and reports ended requests to its workers in one more."""


def engine_arguments(plan: LoadPlan) -> dict[str, Any]:
    """Keyword arguments of vllm.EngineArgs."""
    scheduler = "QlmAsyncScheduler" if plan.engine.get("async_scheduling") else "QlmScheduler"
    return {
        "model": plan.weights,
        "tokenizer": plan.weights,
        "disable_log_stats": True,
        "async_scheduling": False,
        "scheduler_cls": f"qlm_agent.engines.vllm.scheduler.scheduler.{scheduler}",
        "worker_extension_cls": EXTENSION,
        "additional_config": {"qlm": {"policy": plan.policy, "policy_options": plan.policy_options}},
        **offloading_config(plan.host_kv_bytes),
        **plan.engine,
    }


def offloading_config(host_kv_bytes: int) -> dict[str, Any]:
    """Arguments of vllm.EngineArgs for KV swap: at most `host_kv_bytes` of host memory, all workers together, hold the KV of offloaded
    requests. They are taken at the start (pinned on CUDA). Nothing for 0: then nothing can be offloaded."""
    if host_kv_bytes <= 0:
        return {}
    from vllm.config import KVTransferConfig

    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="QlmKvConnector",
            kv_connector_module_path="qlm_agent.engines.vllm.scheduler.kv_connector",
            # Loads are in the order of the model's stream; as a consumer vLLM would delay freeing blocks for loads that are not.
            kv_role="kv_producer",
            kv_connector_extra_config={"qlm_host_kv_bytes": host_kv_bytes},
        )
    }


MODEL_DEFAULTS = ("temperature", "top_p", "repetition_penalty")
"""Parameters that a request may leave to the model's generation_config.json."""


def vllm_arguments(sampling: Mapping[str, Any], output_tokens: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams. `sampling`: as RunPlan has it; `defaults`: the model's own. Without stop strings, which
    `runs` matches; `structured_outputs` are arguments of vllm's StructuredOutputsParams."""
    arguments: dict[str, Any] = {name: defaults[name] for name in MODEL_DEFAULTS if name in defaults}
    arguments |= {name: value for name, value in sampling.items() if name not in ("stop", "json_schema", "regex")}
    if structured := {name: sampling[key] for name, key in (("json", "json_schema"), ("regex", "regex")) if sampling.get(key)}:
        arguments["structured_outputs"] = structured
    return {**arguments, "max_tokens": output_tokens, "detokenize": False}


def sampling_params(sampling: Mapping[str, Any], output_tokens: int, defaults: Mapping[str, Any], policy: dict[str, Any]) -> Any:
    """vllm.SamplingParams of a run. Raises ValueError."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    arguments = vllm_arguments(sampling, output_tokens, defaults)
    if "structured_outputs" in arguments:
        arguments["structured_outputs"] = StructuredOutputsParams(**arguments["structured_outputs"])
    return SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA, extra_args={"qlm": policy})


class LlmEngineRunner:
    """See `qlm_agent.engines.vllm.runner.port.Runner`."""

    def __init__(self, plan: LoadPlan) -> None:
        from vllm import EngineArgs
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(plan)))
        config = self._engine.vllm_config
        self._core = self._engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._block_size: int = config.cache_config.block_size
        self._kv_capacity_tokens = (self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1) * self._block_size
        self.kv_limit_tokens: int = config.model_config.max_model_len
        self._defaults: dict[str, Any] = config.model_config.get_diff_sampling_param()
        self._text = ModelText(Path(plan.weights), self._engine.get_tokenizer().eos_token_id, plan.chat_template)
        self.eos_ids = self._text.eos_ids
        self._inner: dict[str, str] = {}  # run id -> vLLM's own id of it
        self._params: dict[str, Any] = {}  # vLLM's id -> its sampling parameters, if it has log probabilities
        self._started: dict[str, float] = {}  # vLLM's id -> when it began
        self._waiting_max = 0
        self._pauses = {True: PauseState.PAUSED_ALL, False: PauseState.UNPAUSED}
        self._kv_bytes_per_token = plan.kv_bytes_per_token
        self._weights = plan.weights
        self._sleeping = SleepingModel(self._engine, expected_bytes=plan.device_bytes)

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    def check(self) -> None:
        if getattr(self._core.model_executor, "is_failed", False):  # a worker has ended; errors in this process are raised
            raise VllmProcessEnded("a process of vLLM's own has ended")

    def text_prompt(self, prompt: TextPrompt) -> list[int]:
        return self._text.text_prompt(prompt)

    def chat_prompt(self, prompt: ChatPrompt) -> list[int]:
        return self._text.chat_prompt(prompt)

    def text_of(self, before: Sequence[int]) -> Callable[[int], str | None]:
        return self._text.text_of(before)

    def add(self, plan: RunPlan, output_tokens: int) -> None:
        policy = {**plan.policy, "run_id": plan.run_id}
        params = sampling_params(plan.sampling, output_tokens, self._defaults, policy)
        prompt = {"prompt_token_ids": [*plan.prompt, *plan.produced]}
        inner = self._inner[plan.run_id] = self._engine.add_request(plan.run_id, prompt, params)
        if params.logprobs is not None:
            self._params[inner] = params

    def abort(self, run_ids: Sequence[str]) -> None:
        inner = [self._inner.pop(run_id) for run_id in run_ids if run_id in self._inner]
        self._forget(inner)
        self._engine.abort_request(inner, internal=True)

    def step(self) -> list[RunOutput]:
        began_s = time.monotonic()
        outputs = self._engine.step()
        now_s = time.monotonic()
        self._record_starts(began_s)
        made: list[RunOutput] = []
        for output in outputs:
            inner = self._inner.get(output.request_id)
            if inner is None:
                continue
            completion = output.outputs[0]
            entry = RunOutput(output.request_id, list(completion.token_ids), self._started.get(inner, began_s), now_s, now_s)
            entry.cached_tokens = output.num_cached_tokens
            if inner in self._params:
                entry.logprobs = records_of(completion, self._params[inner])
            if output.finished:
                entry.finish = FINISHES.get(completion.finish_reason or "", "")
                if not entry.finish:
                    entry.failure, entry.message = FailureKind.BROKEN.value, f"vLLM ended the run: {completion.finish_reason}"
                del self._inner[output.request_id]
                self._forget([inner])
            made.append(entry)
        return made

    def pause(self, paused: bool) -> None:
        self._scheduler.set_pause_state(self._pauses[paused])

    def offload(self, run_ids: Sequence[str]) -> Sequence[str]:
        leaving: list[str] = self._scheduler.offload(run_ids)
        return leaving

    def offloaded(self) -> Collection[str]:
        away: set[str] = self._scheduler.offloaded()
        return away

    def leaving(self) -> Collection[str]:
        leaving: set[str] = self._scheduler.leaving()
        return leaving

    def restore(self, run_ids: Sequence[str]) -> Sequence[str]:
        back: list[str] = self._scheduler.restore(run_ids)
        return back

    def sleep(self, level: int) -> None:
        self._end_steps()
        self._engine.reset_prefix_cache()
        self._sleeping.sleep(level)

    def wake(self, level: int) -> None:
        self._sleeping.wake(level, self._weights)

    def trim(self) -> None:
        self._sleeping.give_back()

    def reload(self, weights: str) -> None:
        self._end_steps()
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": weights})
        self._weights = weights
        self._engine.reset_prefix_cache()

    def stats(self) -> RunnerStats:
        running, waiting = self._scheduler.get_request_counts()
        return RunnerStats(
            running=running,
            waiting=waiting,
            kv_used_tokens=round(self._scheduler.get_kv_cache_usage() * self._kv_capacity_tokens),
            kv_capacity_tokens=self._kv_capacity_tokens,
            preemptions=self._scheduler.preemptions,
            waiting_max=self._waiting_max,
            host_kv_used_tokens=self._scheduler.host_kv_used_tokens(),
            host_kv_capacity_tokens=self._scheduler.host_kv_capacity_tokens(),
            kv_bytes_per_token=self._kv_bytes_per_token,
        )

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _end_steps(self) -> None:
        """Waits for steps under way of a model without runs to serve; aborted ones may be in them."""
        for _ in range(STEPS_UNDER_WAY_MAX):
            if not self._core.batch_queue:
                return
            self._engine.step()
        raise RuntimeError("vLLM goes on with steps of a model that has no runs")

    def _record_starts(self, began_s: float) -> None:
        """Records the runs that began in the last step, and counts those that wait."""
        for request in self._scheduler.running:
            self._started.setdefault(request.request_id, began_s)
        self._waiting_max = max(self._waiting_max, self._scheduler.get_request_counts()[1])

    def _forget(self, inner: Sequence[str]) -> None:
        for request_id in inner:
            self._started.pop(request_id, None)
            self._params.pop(request_id, None)
