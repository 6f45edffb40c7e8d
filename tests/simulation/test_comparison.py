"""Comparison runs: every request has its times, policies differ, and services learn as live ones do."""

from __future__ import annotations

from dataclasses import replace

from qlm_agent.config import AgentSettings
from qlm_agent.engines.simulated.timing import InstanceNoise
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.overload import Overload
from qlm_core.vocabulary.request import RequestState, Slo, SloKind
from qlm_planner.policy import Policy
from qlm_process.wire import profile as profile_wire
from qlm_sim import ClusterDescription, InstanceDescription, SimRequest, simulate
from qlm_sim.cluster import Cluster

MODELS = (ModelSpec(name="mistral-7b", profile="Mistral-7B"), ModelSpec(name="vicuna-13b", profile="Vicuna-13B"))
CLUSTER = ClusterDescription(
    models=MODELS,
    instances=tuple(
        InstanceDescription(agent=AgentSettings(name=f"a100-{number}", models=("mistral-7b", "vicuna-13b"))) for number in range(2)
    ),
)


def workload(count: int) -> list[SimRequest]:
    """Models by turns, and each third request urgent."""
    return [
        SimRequest(
            request_id=f"r{number}",
            arrival_s=number * 0.25,
            model=MODELS[number % 2].name,
            prompt_tokens=50 + number,
            output_tokens=20 + number % 7 * 30,
            slo=Slo(kind=SloKind.COMPLETION, seconds=20.0 if number % 3 == 0 else 600.0),
        )
        for number in range(count)
    ]


def test_every_request_completes_with_its_times() -> None:
    requests = workload(60)
    result = simulate(CLUSTER, requests)
    assert [outcome.request_id for outcome in result.outcomes] == [request.request_id for request in requests]
    for request, outcome in zip(requests, result.outcomes, strict=True):
        assert outcome.state is RequestState.COMPLETED
        assert outcome.output_tokens == request.output_tokens
        assert request.arrival_s <= outcome.accepted_s < outcome.first_token_s <= outcome.finished_s <= result.ended_s
        assert outcome.attempts >= 1
        assert outcome.instance in {"a100-0", "a100-1"}


def test_engines_have_the_hidden_bias_of_live_ones_with_the_seed_of_the_run() -> None:
    biases: list[float] = []
    simulate(CLUSTER, workload(3), seed=7, probes=[(0.5, lambda cluster: biases.extend(agent._noise.bias for agent in cluster.agents))])
    live = [InstanceNoise(seed=7, instance=each.name, step_noise=0.05, bias_max=0.15).bias for each in CLUSTER.instances]
    assert biases == live


def test_without_predictions_no_wait_is_predicted() -> None:
    result = simulate(replace(CLUSTER, predictions=False), workload(30), "slo")
    assert all(outcome.predicted_wait_s is None and outcome.state is RequestState.COMPLETED for outcome in result.outcomes)


def test_urgent_requests_do_better_under_slo_than_in_the_order_of_arrival() -> None:
    """Requests for both models arrive at once at one instance, which in the order of arrival changes its model again and again."""
    one = replace(CLUSTER, instances=CLUSTER.instances[:1])
    requests = [replace(request, arrival_s=request.arrival_s / 4, output_tokens=100) for request in workload(60)]
    results = {order: simulate(one, requests, order) for order in ("slo", "fcfs")}
    late = {order: sum(not outcome.in_time for outcome in result.outcomes) for order, result in results.items()}
    assert late["slo"] < late["fcfs"]
    swaps = {order: sum(result.swaps.values()) for order, result in results.items()}
    assert 1 <= swaps["slo"] < swaps["fcfs"]


def test_requests_that_would_be_late_are_refused_and_the_rest_is_in_time() -> None:
    """More than one instance serves: under `refuse` some are never admitted, and nearly all admitted ones are served in time.
    No fewer of all are in time than where all are admitted, to within a twentieth, and far fewer are late."""
    one = replace(CLUSTER, models=MODELS[:1], instances=(CLUSTER.instances[0].changed({"models": ("mistral-7b",), "batch_max": 4}, {}),))
    slo = Slo(kind=SloKind.COMPLETION, seconds=20.0)
    requests = [replace(each, model="mistral-7b", output_tokens=200, slo=slo) for each in workload(160)]
    in_time, accepted = [0, 0], 0
    for seed in (1, 2, 3):
        free, refusing = (simulate(one, requests, Policy(overload=each), seed=seed) for each in (Overload.BEST_EFFORT, Overload.REFUSE))
        assert not any(outcome.refused for outcome in free.outcomes)
        refused = [outcome for outcome in refusing.outcomes if outcome.refused]
        assert 0 < len(refused) < len(requests)
        assert all(outcome.state is None and not outcome.accepted_s for outcome in refused)
        assert all(outcome.state is RequestState.COMPLETED for outcome in refusing.outcomes if not outcome.refused)
        in_time = [count + sum(outcome.in_time for outcome in run.outcomes) for count, run in zip(in_time, (free, refusing), strict=True)]
        accepted += len(requests) - len(refused)
    assert in_time[1] > 0.95 * in_time[0]
    assert in_time[1] > 0.9 * accepted


def test_gateways_use_learned_profiles() -> None:
    """As live, a gateway reads the profiles: once answers are seen to be as long as clients allow, long ones get groups of their own. And
    the estimator receives the predictions given to clients, and calibrates them."""
    one = replace(CLUSTER, models=MODELS[:1], instances=(CLUSTER.instances[0].changed({"models": ("mistral-7b",), "batch_max": 8}, {}),))
    lengths = (12, 400)
    requests = [
        replace(each, model="mistral-7b", arrival_s=number / 2, prompt_tokens=64, output_tokens=tokens, output_tokens_max=tokens)
        for number, (each, tokens) in enumerate(zip(workload(140), lengths * 70, strict=True))
    ]
    classes: set[str] = set()
    calibrated: list[bool] = []

    def poll(cluster: Cluster) -> None:
        state = cluster.server.queue.state
        classes.update(group.meta["token_class"] for group in state.groups.values())
        _, body = state.profiles
        calibrated.append(bool(body) and bool(profile_wire.from_body(body).calibration.rows))

    simulate(one, requests, probes=[(float(at_s), poll) for at_s in range(1, 70)])
    assert {"64", "64/o1024"} <= classes, "nothing is known at first"
    assert calibrated[-1]
