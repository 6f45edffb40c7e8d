"""A whole cluster whose agent serves two models with vLLM: requests through the SDK, swaps, and processes that are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import qlm
from running_cluster import RunningCluster, gone, wait_until

MODELS = ("tiny-a", "tiny-b")
OUTPUT_TOKENS = 500
REQUESTS = 8
ANSWER_S = 240.0
READY_S = 240.0
AGENT = {"name": "vllm-0", "gpu": "CPU", "engine": "vllm", "batch_max": 8, "models": list(MODELS)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_models: tuple[Path, Path]) -> Iterator[RunningCluster]:
    facts = {"parameters_billion": 0.0013, "layers": 4, "hidden_size": 128, "kv_heads": 2, "head_size": 32}
    models = [
        {
            "name": name,
            "profile": "tiny",
            "context_tokens_max": 2048,
            "vocabulary_size": 2048,
            "tokenizer": str(folder / "tokenizer.json"),
            "weights": str(folder),
            "facts": facts,
        }
        for name, folder in zip(MODELS, tiny_models, strict=True)
    ]
    settings = {"models": json.dumps(models), "agents": json.dumps([AGENT]), "agent.vllm.kv_cache_gb": "0.1"}
    running = RunningCluster(tmp_path_factory.mktemp("vllm") / "state", settings)
    running.start(until_ready=False)
    try:
        running.wait_for(lambda state: state.ready, READY_S)
        yield running
    finally:
        running.__exit__()


def prompt(number: int) -> list[int]:
    return [3 + (number * 31 + at * 7) % 2000 for at in range(30)]


def submit_all(client: qlm.Client) -> dict[str, tuple[str, int]]:
    """Submits every request of every model; which is which by request id."""
    return {
        client.submit(model, prompt(number), slo_s=900.0, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True).request_id: (
            model,
            number,
        )
        for model in MODELS
        for number in range(REQUESTS)
    }


def outputs(client: qlm.Client, submitted: dict[str, tuple[str, int]]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Waits for all of them."""
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for request_id, which in submitted.items():
        result = client.result(request_id, ANSWER_S)
        assert result is not None, f"{which} has no result"
        assert result.state is qlm.RequestState.COMPLETED, f"{which}: {result}"
        assert (result.finish_reason, result.prompt_tokens, result.output_tokens) == ("length", 30, OUTPUT_TOKENS)
        found[which] = tuple(result.token_ids)
    return found


def state_of(client: qlm.Client, request_id: str) -> qlm.RequestState | None:
    request = client.status(request_id).request
    return None if request is None else request.state


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def engine_pids(cluster: RunningCluster) -> list[int]:
    """The engine processes of the agent, which one process forks."""
    agent = cluster.state.of("agent")[0].pid
    return [engine for template in children_of(agent) for engine in children_of(template)]


def test_two_models_swap_and_nothing_is_lost_when_processes_are_killed(cluster: RunningCluster) -> None:
    with qlm.Client(cluster.address) as client:
        undisturbed = outputs(client, submit_all(client))
        assert len(set(undisturbed.values())) == len(undisturbed)

        submitted = submit_all(client)
        running = next(iter(submitted))
        wait_until(lambda: state_of(client, running) is qlm.RequestState.RUNNING, ANSWER_S, "the first request runs")
        for pid in engine_pids(cluster):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: bool(engine_pids(cluster)), ANSWER_S, "an engine process is started again")

        agent, engines = cluster.state.of("agent")[0].pid, engine_pids(cluster)
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: all(gone(pid) for pid in [agent, *engines]), 60.0, "the agent's processes end with it")
        assert outputs(client, submitted) == undisturbed
