"""The budget for weights in host memory."""

from __future__ import annotations

from qlm_agent.simulated.host_memory import HostMemory


def test_least_recently_used_models_make_room() -> None:
    memory = HostMemory(budget_gb=30.0, weights_gb={"a": 14.0, "b": 14.0, "c": 14.0, "huge": 31.0})
    assert memory.hold("a") == ()
    assert memory.hold("b") == ()
    assert memory.hold("a") == ()  # used again
    assert memory.hold("c") == ("b",)
    assert list(memory.models) == ["a", "c"]
    assert memory.used_gb == 28.0
    assert not memory.fits("huge")
    memory.drop("a")
    memory.drop("a")
    assert list(memory.models) == ["c"]
