"""The asynchronous scheduler, driven by hand: a step is scheduled while the one before is under way. (vLLM turns that off on CPUs.)"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from qlm_agent.engines.policies.urgency import UrgencyFirst
from vllm_in_process import BLOCK_TOKENS, InProcess, prompt_of

HOST_BLOCKS, SEATS = 10, 2


class Pipeline:
    """Two steps in flight; the model says token 7 always. `delivered`: tokens of each run that were reported."""

    def __init__(self, engine: InProcess) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        from qlm_agent.engines.vllm.scheduler.scheduler import QlmAsyncScheduler

        config = engine.core.vllm_config
        config.scheduler_config.async_scheduling = True
        self.scheduler = QlmAsyncScheduler(
            vllm_config=config,
            kv_cache_config=engine.scheduler.kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
        )
        self.delivered: dict[str, int] = {}
        self.scheduled: list[dict[str, int]] = []
        self._flight: deque[Any] = deque()

    def add(self, run_id: str, tokens: int, answer: int, **urgency: Any) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, extra_args={"qlm": {"run_id": run_id, **urgency}})
        self.scheduler.add_request(
            Request(request_id=run_id, prompt_token_ids=prompt_of(1, tokens), sampling_params=params, pooling_params=None)
        )
        self.delivered[run_id] = 0

    def abort(self, run_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(run_id, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        self._flight.append(output)
        self.scheduled.append(dict(output.num_scheduled_tokens))
        return output

    def land(self) -> None:
        """The oldest step under way ends."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self._flight.popleft()
        names = list(output.num_scheduled_tokens)
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],  # no prompt here needs two steps
        )
        for each in self.scheduler.update_from_output(output, made).values():
            for part in each.outputs:
                self.delivered[part.request_id] += len(part.new_token_ids)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.schedule()
            if len(self._flight) > 1:
                self.land()

    def drain(self) -> None:
        while self._flight:
            self.land()


@pytest.fixture(scope="module")
def engine() -> Iterator[InProcess]:
    engine = InProcess(gpu_blocks=24, host_blocks=HOST_BLOCKS, seats=SEATS, prefix_cache=False)
    yield engine
    engine.close()


@pytest.fixture
def pipeline(engine: InProcess) -> Pipeline:
    return Pipeline(engine)


def test_a_run_in_a_step_under_way_leaves_when_its_output_has_arrived(pipeline: Pipeline) -> None:
    pipeline.add("r", 40, 50)
    pipeline.run(5)  # one step is under way
    assert pipeline.delivered["r"] == 4
    assert pipeline.scheduler.offload(["r"]) == ["r"]
    assert pipeline.scheduler.offloaded() == set()
    output = pipeline.schedule()
    assert output.num_scheduled_tokens == {}, "it is left out of further steps"
    pipeline.land()
    assert pipeline.delivered["r"] == 5, "its output is reported"
    output = pipeline.schedule()
    (copies,) = output.kv_connector_metadata.stores.values()
    assert len(copies) == 2  # 40 + 5 - 1 tokens
    pipeline.drain()
    assert pipeline.scheduler.offloaded() == {"r"}
    assert pipeline.scheduler.restore(["r"]) == ["r"]
    output = pipeline.schedule()
    assert output.num_scheduled_tokens == {"r": 1}
    cached = output.scheduled_cached_reqs
    assert (cached.req_ids, cached.num_computed_tokens, cached.resumed_req_ids) == (["r"], [44], {"r"})
    assert len(cached.all_token_ids["r"]) == 45, "the worker needs its tokens again"
    pipeline.run(60)
    pipeline.drain()
    assert pipeline.delivered["r"] == 50
    assert not pipeline.scheduler.requests


def test_a_run_whose_last_token_is_under_way_ends_and_does_not_leave(pipeline: Pipeline) -> None:
    pipeline.add("r", 40, 5)
    pipeline.run(5)
    assert pipeline.scheduler.offload(["r"]) == ["r"]
    assert pipeline.scheduler.host_kv_used_tokens() == 2 * BLOCK_TOKENS
    pipeline.drain()
    assert pipeline.delivered["r"] == 5
    assert pipeline.scheduler.offloaded() == set()
    assert pipeline.scheduler.host_kv_used_tokens() == 0
    assert not pipeline.scheduler.requests


def test_a_run_that_is_aborted_while_it_leaves_holds_nothing(pipeline: Pipeline) -> None:
    pipeline.add("r", 40, 50)
    pipeline.run(5)
    assert pipeline.scheduler.offload(["r"]) == ["r"]
    pipeline.abort("r")
    assert pipeline.scheduler.host_kv_used_tokens() == 0
    pipeline.drain()
    assert pipeline.delivered["r"] == 4
    assert pipeline.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 24


def test_a_run_that_loses_its_kv_while_it_leaves_computes_it_again(pipeline: Pipeline) -> None:
    pipeline.add("r", 40, 50)
    pipeline.run(5)
    assert pipeline.scheduler.offload(["r"]) == ["r"]
    assert pipeline.scheduler.leaving() == {"r"}
    assert pipeline.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert pipeline.scheduler.leaving() == set(), "whoever moved it would wait for it"
    assert pipeline.scheduler.host_kv_used_tokens() == 0
    pipeline.run(60)
    pipeline.drain()
    assert pipeline.delivered["r"] == 50
    assert pipeline.scheduler.offloaded() == set()


def test_an_urgent_run_preempts_one_in_a_step_under_way_and_its_output_is_kept(pipeline: Pipeline) -> None:
    pipeline.scheduler.engine_policy = UrgencyFirst()
    pipeline.add("a", 40, 50, priority=5)
    pipeline.add("b", 40, 50, priority=5)
    pipeline.run(5)
    pipeline.add("urgent", 40, 3, priority=0)
    output = pipeline.schedule()
    assert output.num_scheduled_tokens.keys() == {"a", "urgent"}
    pipeline.run(80)
    pipeline.drain()
    assert pipeline.delivered == {"a": 50, "b": 50, "urgent": 3}
    assert pipeline.scheduler.preemptions == 1
