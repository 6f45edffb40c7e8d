"""Host memory of one instance: a budget for the weights of warm models, and one of its own for the KV of offloaded runs.

They are separate, as in vLLM, which reserves pinned memory for KV when it starts: weights never take the KV of a run that must be restored,
and offloading never makes the next model cold.
"""

from __future__ import annotations

from collections.abc import Mapping


class HostWeights:
    """The models with weights in host memory; the least recently used is dropped first. The active model keeps its copy there while the
    budget allows, so that leaving the GPU costs nothing."""

    def __init__(self, *, budget_gb: float, weights_gb: Mapping[str, float]) -> None:
        self.budget_gb = budget_gb
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
        return self._weights_gb[model] <= self.budget_gb

    def hold(self, model: str) -> tuple[str, ...]:
        """Takes a model in, or marks it as used now; returns the dropped ones. It must fit."""
        assert self.fits(model), model
        self._held.pop(model, None)
        dropped: list[str] = []
        while self.used_gb + self._weights_gb[model] > self.budget_gb:
            oldest = next(iter(self._held))
            del self._held[oldest]
            dropped.append(oldest)
        self._held[model] = None
        return tuple(dropped)

    def drop(self, model: str) -> None:
        """Forgets a model; nothing if it is not held."""
        self._held.pop(model, None)


class HostKv:
    """The budget for the KV of offloaded runs, in bytes: runs of several models share it."""

    def __init__(self, *, budget_gb: float) -> None:
        self.capacity_bytes = int(budget_gb * 1e9)
        self.used_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Takes so much if it is free."""
        if self.used_bytes + size_bytes > self.capacity_bytes:
            return False
        self.used_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        assert 0 <= size_bytes <= self.used_bytes, f"{size_bytes} bytes given back, {self.used_bytes} taken"
        self.used_bytes -= size_bytes
