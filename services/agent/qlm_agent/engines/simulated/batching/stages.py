"""The stages of a pipeline."""

from __future__ import annotations


class Stages:
    """`count` stages that take one batch each, in the order in which these enter. `free_at_s`: when the first stage is free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free_at_s = 0.0
        self._left_at_s = 0.0  # when the last batch leaves the last stage

    def carry(self, now_s: float, stage_s: float) -> float:
        """A batch enters now and takes `stage_s` in each stage; returns when it leaves the last one. Behind a slower batch it waits before
        every stage, so it leaves one stage after that; behind a faster one it never waits."""
        assert now_s >= self.free_at_s, "the first stage is taken"
        self.free_at_s = now_s + stage_s
        self._left_at_s = max(now_s + self.count * stage_s, self._left_at_s + stage_s)
        return self._left_at_s

    def skip_time(self, seconds: float) -> None:
        """The stages stood still."""
        self.free_at_s += seconds
        self._left_at_s += seconds
