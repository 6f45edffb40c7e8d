"""A policy's view of vLLM (`policies.port.EngineView`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

SMOOTHING = 0.05
"""Weight of the last step in the means of step times."""


class SchedulerView:
    """Reads one scheduler. Durations of steps are learned: a step of decodes, and each prompt token beside it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._began_s: float | None = None
        self._prompt_tokens = 0
        self._decode_s = 0.0
        self._prompt_token_s = 0.0

    @property
    def model(self) -> str:
        return str(self._scheduler.vllm_config.model_config.model)

    @property
    def seats(self) -> int:
        return int(self._scheduler.max_num_running_reqs)

    @property
    def kv_capacity_tokens(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks * self._scheduler.block_size)

    @property
    def kv_free_tokens(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * self._scheduler.block_size)

    @property
    def step_tokens_max(self) -> int:
        return int(self._scheduler.max_num_scheduled_tokens)

    def expected_step_s(self, decoding: int, context_tokens: int, prefills: Sequence[tuple[int, int]]) -> float:
        """See EngineView; 0 before any step was measured."""
        return self._decode_s + self._prompt_token_s * sum(tokens for _, tokens in prefills)

    def step_began(self, now_s: float, *, idle: bool) -> float:
        """Ends the measurement of the step before; returns its seconds, 0 after an idle time."""
        step_s = 0.0 if self._began_s is None or idle else now_s - self._began_s
        self._began_s = now_s
        if step_s and not self._prompt_tokens:
            self._decode_s += (step_s - self._decode_s) * (SMOOTHING if self._decode_s else 1.0)
        elif step_s:
            token_s = max(0.0, step_s - self._decode_s) / self._prompt_tokens
            self._prompt_token_s += (token_s - self._prompt_token_s) * (SMOOTHING if self._prompt_token_s else 1.0)
        return step_s

    def step_scheduled(self, tokens: int, requests: int) -> None:
        """The step that begins has so many tokens of so many requests; those beyond one each are of prompts."""
        self._prompt_tokens = tokens - requests
