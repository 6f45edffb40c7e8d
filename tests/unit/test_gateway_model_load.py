"""Load that a gateway reports by model, as vLLM's servers do."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from qlm_agent.engines.openai.server_load import read_load
from qlm_core.prediction.reported_runs import GroupRuns, ReportedRuns
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.outlook.model_load import ModelLoad, model_loads
from qlm_process.wire.running import to_body
from qlm_queue.overview import InstanceRecord, Overview
from qlm_queue.values import GroupRecord

SEVEN, CODE = (ModelSpec(name=name, profile="Mistral-7B", context_tokens_max=4096) for name in ("seven", "code"))
CATALOGUE = {spec.name: spec for spec in (SEVEN, CODE)}
PROFILES = shipped_snapshot()


def group(group_id: str, model: str, waiting: int, *, instance: str = "a") -> GroupRecord:
    return GroupRecord(
        group_id=group_id, instance=instance, last_instance="a", waiting=waiting, live=waiting, waiting_prompt_tokens=0,
        first_deadline_s=1.0, next_deadline_s=1.0, last_deadline_s=1.0, meta={"model": model},
    )  # fmt: skip


def facts(name: str, active_model: str) -> InstanceFacts:
    return InstanceFacts(
        name=name,
        incarnation=f"{name}/1",
        gpu="A100-80GB",
        n_gpu=1,
        engine="simulated",
        models=("seven", "code"),
        active_model=active_model,
    )


def record(instance: InstanceFacts, *runs: GroupRuns, alive: bool = True) -> InstanceRecord:
    reported = ReportedRuns(at_s=1.0, token_s=0.01, groups={f"g{number}": each for number, each in enumerate(runs)})
    return InstanceRecord(name=instance.name, incarnation=instance.incarnation, alive=alive, body=to_body(instance, reported))


def seen(groups: tuple[GroupRecord, ...], instances: tuple[InstanceRecord, ...]) -> Overview:
    return Overview(
        plan_version=1, accepted_count=0, live=0, unplaced=0, virtual_queues=(), groups={each.group_id: each for each in groups},
        instances=instances, incarnations={}, last_event_id="0",
    )  # fmt: skip


def test_requests_and_kv_are_reported_by_model() -> None:
    hardware = PROFILES.hardware_for(facts("a", "seven"), SEVEN)
    assert hardware is not None
    runs = GroupRuns(output_tokens=(100, 200), prompt_tokens=1_000, prefill_left_tokens=300, offloaded_tokens=50)
    overview = seen(
        (
            group("g0", "seven", 5),
            group("g1", "seven", 2, instance="unassigned"),
            group("g2", "code", 7),
            group("g3", "code", 9, instance=""),
        ),
        (record(facts("a", "seven"), runs), record(facts("b", "seven")), record(facts("c", "code"), runs, alive=False)),
    )
    loads = model_loads(overview, CATALOGUE, PROFILES)
    assert loads["seven"] == ModelLoad(waiting=7, running=2, kv_usage=950 / (2 * hardware.kv_capacity_tokens))
    assert loads["code"] == ModelLoad(waiting=7, running=0, kv_usage=0.0)


def test_a_reader_of_vllm_reads_them() -> None:
    metrics = GatewayMetrics()
    metrics.model_loads.read = lambda: {
        "seven": ModelLoad(waiting=7, running=2, kv_usage=0.25),
        "code": ModelLoad(waiting=1, running=0, kv_usage=0.0),
    }
    text = generate_latest(metrics.registry).decode()
    load = read_load(text)
    assert load is not None
    assert (load.waiting, load.running) == (8, 2)
    by_model = {
        (sample.name, sample.labels["model_name"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }
    assert by_model["vllm:kv_cache_usage_perc", "seven"] == 0.25
    assert by_model["vllm:num_requests_waiting", "code"] == 1.0
    assert len(by_model) == 6


def test_while_the_queue_is_away_nothing_is_reported() -> None:
    assert "vllm:num_requests_waiting{" not in generate_latest(GatewayMetrics().registry).decode()
