"""Where the weights of models are, and when they move (QLM section 5, model warm start): active, warm or cold by the virtual queue.

The next model of the queue becomes active when the GPU is empty. It is warmed beside the running batch, and then the models behind it in
queue order, as far as host memory holds them; only models that are needed later become cold for them. One model is moved to or from host
memory at a time, and one made active beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from qlm_agent.decisions.effects import Effect, LoadAnswer, LoadModel
from qlm_agent.decisions.runs import Operations
from qlm_agent.engines.port import Tier

RETRY_MIN_S = 0.5
RETRY_MAX_S = 30.0

REWARM_S = 30.0
"""Pause before a model that could not be warmed is tried again."""


class ModelSwapControl:
    """`weights_gb`: by model, as far as known; a model of unknown weight is warmed only as the next. `ahead`: also warm models behind the
    next one."""

    def __init__(
        self, models: tuple[str, ...], weights_gb: Mapping[str, float], host_memory_gb: float, operations: Operations, *, ahead: bool
    ) -> None:
        self.models = models
        self.active = ""
        self.swapping_to = ""  # the model that becomes active now
        self.kv_capacity_tokens = 0
        self.swaps = 0
        self._weights_gb = weights_gb
        self._host_memory_gb = host_memory_gb
        self._operations = operations
        self._ahead = ahead
        self._warm: tuple[str, ...] = ()
        self._moving: tuple[str, Tier] | None = None  # to or from host memory
        self._callers: list[int] = []  # callers that wait for the move
        self._unwarmable: dict[str, float] = {}  # until when
        self._retry_s = 0.0
        self._retry_at_s: float | None = None
        self._failed = ""

    @property
    def failing(self) -> str:
        """The model that failed to become active more than once in a row: the engine serves nobody. "" otherwise."""
        return self._failed if self._retry_s > RETRY_MIN_S else ""

    @property
    def next_wakeup_s(self) -> float | None:
        return self._retry_at_s if not self.swapping_to else None

    def is_warm(self, model: str) -> bool:
        return model in self._warm

    def update_weights(self, weights_gb: Mapping[str, float]) -> None:
        """Sets the weights of all models with known ones."""
        self._weights_gb = weights_gb

    def decide(self, now_s: float, order: Sequence[str], *, engine_empty: bool) -> list[Effect]:
        """`order`: models by when they are wanted, the next first; `engine_empty`: no run is on the GPU, and no pull under way may bring
        one."""
        order = [model for model in order if model in self.models]
        if self.swapping_to or not order:
            return []
        wanted = order[0]
        if wanted != self.active and engine_empty:
            if not self._may_activate(now_s, wanted):
                return []
            self.swapping_to = wanted
            return [LoadModel(model=wanted, tier=Tier.ACTIVE)]
        if self._moving is not None:
            return []
        self._moving = self._next_move(now_s, order)
        return [] if self._moving is None else [LoadModel(model=self._moving[0], tier=self._moving[1])]

    def _may_activate(self, now_s: float, model: str) -> bool:
        if self._moving is not None and self._moving[0] == model:
            return False
        if self._retry_at_s is not None and now_s < self._retry_at_s:
            return False
        self._retry_at_s = None
        return True

    # Host memory ------------------------------------------------------------------------------------------------------

    def _next_move(self, now_s: float, order: Sequence[str]) -> tuple[str, Tier] | None:
        """The next model to be warmed, or the one that becomes cold for it."""
        for place, model in enumerate(order if self._ahead else order[:1]):
            if model == self.active or model in self._warm or now_s < self._unwarmable.get(model, -math.inf):
                continue
            if model not in self._weights_gb:
                if place == 0:
                    return model, Tier.WARM
                continue
            later = self._later_than(order, place)
            # The active model has its copy there too, so that leaving the GPU costs nothing.
            held = [*self._warm, self.active] if self.active else list(self._warm)
            if self._fits(model, held):
                return model, Tier.WARM
            if self._fits(model, [each for each in held if each not in later]):
                return later[0], Tier.COLD
            if place == 0 and self._fits(model, [each for each in held if each not in later and each != self.active]):
                # Only without that copy, which the engine then drops.
                return (later[0], Tier.COLD) if later else (model, Tier.WARM)
        return None

    def _later_than(self, order: Sequence[str], place: int) -> list[str]:
        """Warm models that are needed later, the last one first; unneeded models before all."""
        waited_for = [model for model in order if model in self._warm]
        unwanted = [model for model in self._warm if model not in waited_for]
        return unwanted + [model for model in reversed(order[place + 1 :]) if model in self._warm]

    def _fits(self, model: str, beside: Sequence[str]) -> bool:
        return self._weights_gb[model] + sum(self._weights_gb.get(each, 0.0) for each in beside) <= self._host_memory_gb

    # Answers ----------------------------------------------------------------------------------------------------------

    def end_load(self, model: str, tier: Tier, took_s: float, active: str, warm: tuple[str, ...], kv_capacity_tokens: int) -> list[Effect]:
        """A transfer is done."""
        self._active_is(active, warm)
        self.kv_capacity_tokens = kv_capacity_tokens
        if tier is Tier.ACTIVE:
            self.swaps += 1
            self._retry_s = 0.0
            self.swapping_to = ""
            return []
        self._operations.warmings += tier is Tier.WARM
        return self._moved(LoadAnswer(caller=0, took_s=took_s))

    def fail_load(self, now_s: float, model: str, tier: Tier, message: str, active: str, warm: tuple[str, ...]) -> list[Effect]:
        """A transfer failed. A warm load is retried late, since it is optional; an active one soon."""
        self._active_is(active, warm)
        if tier is Tier.ACTIVE:
            self._retry_s = min(RETRY_MAX_S, max(RETRY_MIN_S, 2 * self._retry_s))
            self._retry_at_s = now_s + self._retry_s
            self._failed = model
            self.swapping_to = ""
            return []
        self._unwarmable[model] = now_s + REWARM_S
        return self._moved(LoadAnswer(caller=0, problem="MODEL_BUSY", message=message))

    def request(self, caller: int, model: str, tier: Tier) -> list[Effect]:
        """Takes a command to make a model warm or cold."""
        assert tier is not Tier.ACTIVE
        if model not in self.models:
            return [
                LoadAnswer(caller=caller, problem="UNKNOWN_MODEL", message=f"model {model} is not served here: {', '.join(self.models)}")
            ]
        if self._moving == (model, tier):
            self._callers.append(caller)
            return []
        busy = self.swapping_to or (self._moving[0] if self._moving is not None else "")
        if busy:
            return [LoadAnswer(caller=caller, problem="MODEL_BUSY", message=f"model {busy} is being moved")]
        if model == self.active and tier is Tier.COLD:
            return [LoadAnswer(caller=caller, problem="MODEL_BUSY", message=f"model {model} is active")]
        if model == self.active or (model in self._warm) == (tier is Tier.WARM):
            return [LoadAnswer(caller=caller)]
        self._callers.append(caller)
        self._moving = (model, tier)
        return [LoadModel(model=model, tier=tier)]

    def _active_is(self, active: str, warm: tuple[str, ...]) -> None:
        self.active = active
        self._warm = warm

    def _moved(self, answer: LoadAnswer) -> list[Effect]:
        self._moving = None
        callers, self._callers = self._callers, []
        return [LoadAnswer(caller=caller, took_s=answer.took_s, problem=answer.problem, message=answer.message) for caller in callers]
