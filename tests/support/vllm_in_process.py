"""A real vLLM engine in this process, on a tiny random Llama, stepped by the test. Imports vLLM when one is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from tiny_models import tiny_model

BLOCK_TOKENS = 32
BLOCK_BYTES = 2048 * BLOCK_TOKENS
"""KV of a block of the tiny model, in float32."""

STEPS_MAX = 5000


def prompt_of(number: int, tokens: int) -> list[int]:
    """Token ids; another number is another prompt."""
    return [3 + (number * 7919 + place * 104_729 + number * place * 31) % 2000 for place in range(tokens)]


class InProcess:
    """An engine of `gpu_blocks` blocks of KV and `seats` seats. Greedy requests that make exactly as many tokens as requested."""

    def __init__(self, *, gpu_blocks: int = 40, host_blocks: int = 40, seats: int = 4, prefix_cache: bool = True, **fields: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs, LLMEngine

        from qlm_agent.engines.vllm.runner.llm_engine import offloading_config

        settings: dict[str, Any] = {
            "model": str(tiny_model(1)),
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": seats,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": (gpu_blocks + 1) * BLOCK_BYTES,
            "enforce_eager": True,
            "async_scheduling": False,
            "enable_prefix_caching": prefix_cache,
            "scheduler_cls": "qlm_agent.engines.vllm.scheduler.scheduler.QlmScheduler",
            "skip_tokenizer_init": True,
            **offloading_config(host_blocks * BLOCK_BYTES),
        }
        self.engine = LLMEngine.from_engine_args(EngineArgs(**(settings | fields)))
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.made: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.scheduled: dict[str, int] = {}
        """Tokens of each run that the last step computed."""
        self._ids: dict[str, str] = {}
        self._schedule = self.scheduler.schedule
        self.scheduler.schedule = self._recorded

    def add(self, run_id: str, *, prompt: Sequence[int], answer: int, sampling: dict[str, Any] | None = None, **urgency: Any) -> None:
        from vllm import SamplingParams

        extra = {"qlm": {"run_id": run_id, **urgency}}
        params = SamplingParams(
            max_tokens=answer, ignore_eos=True, detokenize=False, extra_args=extra, **({"temperature": 0.0} | (sampling or {}))
        )
        self._ids[run_id] = self.engine.add_request(run_id, {"prompt_token_ids": list(prompt)}, params)
        self.made[run_id] = []

    def abort(self, run_id: str) -> None:
        self.engine.abort_request([self._ids[run_id]], internal=True)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduled = {}
            for output in self.engine.step():
                self.made[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    self.finished.add(output.request_id)

    def step_until(self, done: Callable[[], bool]) -> None:
        for _ in range(STEPS_MAX):
            if done():
                return
            self.step()
        raise AssertionError(f"not done after {STEPS_MAX} steps: {self.made.keys() - self.finished}")

    def finish(self, *run_ids: str) -> list[list[int]]:
        """Steps until these runs are done; their tokens."""
        self.step_until(lambda: self.finished.issuperset(run_ids))
        return [self.made[run_id] for run_id in run_ids]

    def undisturbed(self, *, prompt: Sequence[int], answer: int, sampling: dict[str, Any] | None = None) -> list[int]:
        """Output of a run by itself, from an empty cache."""
        run_id = f"undisturbed-{len(self.made)}"
        self.engine.reset_prefix_cache()
        self.add(run_id, prompt=prompt, answer=answer, sampling=sampling)
        (made,) = self.finish(run_id)
        self.engine.reset_prefix_cache()
        return made

    def clear(self) -> None:
        """Ends all runs."""
        for run_id in self.made.keys() - self.finished:
            self.abort(run_id)
        self.step_until(lambda: not self.scheduler.has_requests())
        self.engine.reset_prefix_cache()
        self.made.clear()
        self.finished.clear()

    @property
    def gpu_blocks_free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        output = self._schedule(*args, **kwargs)
        names = {internal: run_id for run_id, internal in self._ids.items()}
        self.scheduled = {names[internal]: tokens for internal, tokens in output.num_scheduled_tokens.items()}
        return output
