"""The budgets of host memory."""

from __future__ import annotations

import pytest

from qlm_agent.engines.simulated.host_memory import HostKv, HostWeights


def test_least_recently_used_models_make_room() -> None:
    memory = HostWeights(budget_gb=30.0, weights_gb={"a": 14.0, "b": 14.0, "c": 14.0, "huge": 31.0})
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


def test_kv_takes_what_is_free_and_no_more() -> None:
    memory = HostKv(budget_gb=1e-6)
    assert memory.take(600)
    assert not memory.take(500)
    assert memory.take(400)
    memory.give_back(600)
    assert memory.used_bytes == 400
    with pytest.raises(AssertionError):
        memory.give_back(401)
