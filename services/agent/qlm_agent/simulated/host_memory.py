"""Host memory for the weights of warm models: a budget, least recently used first out."""

from __future__ import annotations

from collections.abc import Mapping


class HostMemory:
    """Which models have their weights in host memory. The active model keeps its copy there while the budget allows, so that leaving the
    GPU costs nothing."""

    def __init__(self, *, budget_gb: float, weights_gb: Mapping[str, float]) -> None:
        self._budget_gb = budget_gb
        self._weights_gb = weights_gb
        self._held: dict[str, None] = {}  # in order of use, oldest first

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._held)

    @property
    def used_gb(self) -> float:
        return sum(self._weights_gb[model] for model in self._held)

    def holds(self, model: str) -> bool:
        return model in self._held

    def fits(self, model: str) -> bool:
        """Whether it can be held at all."""
        return self._weights_gb[model] <= self._budget_gb

    def hold(self, model: str) -> tuple[str, ...]:
        """Takes a model in, or marks it as used now; returns those that had to go. It must fit."""
        assert self.fits(model), model
        self._held.pop(model, None)
        gone: list[str] = []
        while self.used_gb + self._weights_gb[model] > self._budget_gb:
            oldest = next(iter(self._held))
            del self._held[oldest]
            gone.append(oldest)
        self._held[model] = None
        return tuple(gone)

    def drop(self, model: str) -> None:
        """Forgets a model; nothing if it is not held."""
        self._held.pop(model, None)
