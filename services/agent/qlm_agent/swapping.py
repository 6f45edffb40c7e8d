"""Which model is active, and when that changes (QLM section 5, model swapping).

When the head of the virtual queue is of another model, nothing more is pulled for the active one, the head's model is warmed beside the
running batch, and becomes active when that batch is done. One transfer at a time.
"""

from __future__ import annotations

from qlm_agent.effects import Effect, LoadAnswer, LoadModel
from qlm_agent.engine import Tier

RETRY_MIN_S = 0.5
RETRY_MAX_S = 30.0


class Swapping:
    """`swapping_to`: the model that becomes active now, "" if none does."""

    def __init__(self, models: tuple[str, ...]) -> None:
        self.models = models
        self.active = ""
        self.kv_capacity_tokens = 0
        self.swaps = 0
        self._warm: frozenset[str] = frozenset()
        self._transfer: tuple[str, Tier] | None = None
        self._asks: list[int] = []  # who waits for the transfer
        self._unwarmable: set[str] = set()  # looked up only
        self._retry_s = 0.0
        self._retry_at_s: float | None = None

    @property
    def swapping_to(self) -> str:
        return self._transfer[0] if self._transfer is not None and self._transfer[1] is Tier.ACTIVE else ""

    @property
    def next_wakeup_s(self) -> float | None:
        return self._retry_at_s if self._transfer is None else None

    def decide(self, now_s: float, head_model: str, *, engine_empty: bool) -> list[Effect]:
        """`engine_empty`: no run is on the engine, and no pull under way may bring one."""
        if head_model not in self.models or head_model == self.active or self._transfer is not None:
            return []
        if self._retry_at_s is not None and now_s < self._retry_at_s:
            return []
        self._retry_at_s = None
        if engine_empty:
            return [self._load(head_model, Tier.ACTIVE)]
        if head_model not in self._warm and head_model not in self._unwarmable:
            return [self._load(head_model, Tier.WARM)]
        return []

    def loaded(self, model: str, tier: Tier, took_s: float, active: str, warm: tuple[str, ...], kv_capacity_tokens: int) -> list[Effect]:
        """The transfer under way is done."""
        if tier is Tier.ACTIVE:
            self.swaps += 1
            self._retry_s = 0.0
        self.active = active
        self.kv_capacity_tokens = kv_capacity_tokens
        return self._end_transfer(warm, LoadAnswer(ask=0, took_s=took_s))

    def not_loaded(self, now_s: float, model: str, tier: Tier, message: str, active: str, warm: tuple[str, ...]) -> list[Effect]:
        """The transfer under way failed. To be warm is not needed, so that is not tried again; to be active is, after a while."""
        if tier is Tier.ACTIVE:
            self._retry_s = min(RETRY_MAX_S, max(RETRY_MIN_S, 2 * self._retry_s))
            self._retry_at_s = now_s + self._retry_s
        else:
            self._unwarmable.add(model)
        self.active = active
        return self._end_transfer(warm, LoadAnswer(ask=0, problem="MODEL_BUSY", message=message))

    def asked(self, ask: int, model: str, tier: Tier) -> list[Effect]:
        """Somebody wants a model to be warm or cold."""
        assert tier is not Tier.ACTIVE
        if model not in self.models:
            return [LoadAnswer(ask=ask, problem="UNKNOWN_MODEL", message=f"model {model} is not served here: {', '.join(self.models)}")]
        if self._transfer == (model, tier):
            self._asks.append(ask)
            return []
        if self._transfer is not None:
            return [LoadAnswer(ask=ask, problem="MODEL_BUSY", message=f"model {self._transfer[0]} is being moved")]
        if model == self.active and tier is Tier.COLD:
            return [LoadAnswer(ask=ask, problem="MODEL_BUSY", message=f"model {model} is active")]
        if model == self.active or (model in self._warm) == (tier is Tier.WARM):
            return [LoadAnswer(ask=ask)]
        self._asks.append(ask)
        return [self._load(model, tier)]

    def _load(self, model: str, tier: Tier) -> LoadModel:
        self._transfer = (model, tier)
        return LoadModel(model=model, tier=tier)

    def _end_transfer(self, warm: tuple[str, ...], answer: LoadAnswer) -> list[Effect]:
        self._warm = frozenset(warm)
        self._transfer = None
        asks, self._asks = self._asks, []
        return [LoadAnswer(ask=ask, took_s=answer.took_s, problem=answer.problem, message=answer.message) for ask in asks]
