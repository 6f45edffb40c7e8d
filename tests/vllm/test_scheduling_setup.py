"""Refusals of the plug-in for engines and vLLMs that it is not made for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from vllm_in_process import InProcess, prompt_of


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheduling_policy": "priority"}, "leave scheduling_policy"),
        ({"scheduler_cls": "qlm_agent.engines.vllm.scheduler.scheduler.QlmAsyncScheduler"}, "take QlmScheduler"),
        (
            {"additional_config": {"qlm": {"policy": "qlm_agent.engines.policies:Nobody"}}},
            "engine policy qlm_agent.engines.policies:Nobody",
        ),
        ({"additional_config": {"qlm": {"policy_options": {"lead": 1}}}}, "lead"),
    ],
)
def test_a_wrong_setting_stops_the_engine_with_its_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InProcess(host_blocks=0, **fields)


def test_without_host_memory_nothing_can_be_offloaded() -> None:
    engine = InProcess(host_blocks=0)
    try:
        engine.add("r", prompt=[5, 6, 7], answer=9)
        engine.step(3)
        assert engine.scheduler.offload(["r"]) == []
        assert (engine.scheduler.host_kv_used_tokens(), engine.scheduler.host_kv_capacity_tokens()) == (0, 0)
        engine.finish("r")
    finally:
        engine.close()


def test_a_prefill_in_chunks_does_not_leave() -> None:
    engine = InProcess(max_num_batched_tokens=64)
    try:
        engine.add("r", prompt=prompt_of(0, 200), answer=5)
        engine.step()
        assert engine.scheduler.offload(["r"]) == []
        engine.finish("r")
    finally:
        engine.close()


def test_a_prefill_that_is_computed_again_in_chunks_does_not_leave() -> None:
    engine = InProcess(max_num_batched_tokens=64, seats=1, prefix_cache=False)
    try:
        prompt = prompt_of(0, 200)
        expected = engine.undisturbed(prompt=prompt, answer=8)
        engine.add("r", prompt=prompt, answer=8, priority=1)
        engine.step_until(lambda: len(engine.made["r"]) == 3)
        engine.add("urgent", prompt=prompt_of(1, 20), answer=2, priority=0)
        engine.finish("urgent")
        engine.step()
        assert engine.scheduled == {"r": 64}
        assert engine.scheduler.offload(["r"]) == []
        assert engine.finish("r") == [expected]
    finally:
        engine.close()


def test_engines_with_kv_swap_that_share_a_process_are_refused() -> None:
    first = InProcess()
    second = InProcess()
    try:
        second.add("r", prompt=prompt_of(0, 20), answer=5)
        with pytest.raises(AssertionError, match="need a process each"):
            second.step()
    finally:
        second.close()
        first.close()


def test_the_policy_is_chosen_by_name() -> None:
    engine = InProcess(host_blocks=0, additional_config={"qlm": {"policy": "fcfs"}})
    try:
        engine.add("r", prompt=[5, 6, 7], answer=40, priority=9)
        assert type(engine.scheduler.engine_policy).__name__ == "FirstComeFirstServed"
        engine.finish("r")
    finally:
        engine.close()


def test_another_scheduler_than_it_is_made_for_is_refused_with_the_missing_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from qlm_agent.engines.vllm.scheduler.scheduler import check_vllm

    check_vllm()
    monkeypatch.delattr(Scheduler, "_preempt_request")
    with pytest.raises(ImportError, match=r"lacks _preempt_request"):
        check_vllm()


def test_kv_that_kv_swap_cannot_keep_is_refused_by_name() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from qlm_agent.engines.vllm.scheduler.kv_connector import check

    full = SimpleNamespace(kv_cache_spec=Mock(spec=FullAttentionSpec))
    window = SimpleNamespace(kv_cache_spec=Mock(spec=SlidingWindowSpec))

    def config(pipeline: int, speculative: object) -> Any:
        sizes = {"pipeline_parallel_size": pipeline, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
        return SimpleNamespace(parallel_config=SimpleNamespace(**sizes), speculative_config=speculative)

    def cache(*groups: object, zeroed: bool = False) -> Any:
        return SimpleNamespace(kv_cache_groups=groups, needs_kv_cache_zeroing=zeroed)

    check(config(1, None), cache(full))
    for wrong, message in (
        ((config(2, None), cache(full)), "pipeline parallelism"),
        ((config(1, object()), cache(full)), "speculative decoding"),
        ((config(1, None), cache(full, full)), "several kinds of KV cache"),
        ((config(1, None), cache(window)), "sliding windows"),
        ((config(1, None), cache(full, zeroed=True)), "zeroed"),
    ):
        with pytest.raises(ValueError, match=message):
            check(*wrong)
