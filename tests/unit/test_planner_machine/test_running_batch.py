"""When a request ends that is placed in a running batch: what the plan says, against the step-accurate engine without its hidden bias.

Known lengths, and each request that ends is replaced by another one. Found: within 3%. Prompts of 2,000 tokens with outputs of 25 are not
held: steps take in prompts for a batch of 25, and batches of 64 and 256 are predicted at a half and an eighth.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm_agent.engines.simulated.timing import STEP_NOISE_MIN, InstanceNoise, StepTiming
from qlm_core.prediction.reported_runs import GroupRuns, ReportedRuns
from qlm_core.profiles.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.model import ModelSpec
from qlm_planner.cost.estimates import Estimates
from qlm_planner.cost.order_cost import LEAD, OWN
from qlm_planner.cost.service_times import ClassTable
from qlm_planner.plan.waits import views_of
from qlm_planner.policy import Policy
from simulated_steps import make, run

from .test_cheapest_place import board_of, group, lines, slot
from .world import START_S

KV_TOKENS, CHUNK_TOKENS = 1_000_000, 2_048
MISTRAL = next(row for row in shipped_snapshot().hardware if row.key == ("A100-80GB", 1, "Mistral-7B"))
ROW = replace(MISTRAL, gpu="big", model="alpha", kv_capacity_tokens=KV_TOKENS)


def estimates_of(row: HardwareProfile, prompt: int, output: int) -> Estimates:
    """An engine that serves requests of known lengths."""
    workload = WorkloadProfile(
        model="alpha",
        prompt_tokens_mean=prompt,
        prompt_tokens_variance=0.0,
        output_tokens_mean=output,
        output_tokens_variance=0.0,
        samples=1_000_000,
    )
    estimates = Estimates(Policy())
    estimates.load(
        {"alpha": ModelSpec(name="alpha", profile="alpha")}, ProfileSnapshot(version=0, made_s=0.0, hardware=(row,), workload=(workload,))
    )
    return estimates


def predicted_s(running: int, batch_max: int, prompt: int, output: int) -> float:
    """Until it has ended, with nobody before it on the queue."""
    estimates = estimates_of(ROW, prompt, output)
    on, new = slot("a", running=running), group(1, "alpha", 600.0, 1)
    on.facts, new.waiting_prompt_tokens = replace(on.facts, batch_max=batch_max), prompt
    [line] = lines(ClassTable(estimates=estimates), (on, [new]))
    return float(line.engine[LEAD] + line.rows[OWN, 0])


def served_s(running: int, batch_max: int, prompt: int, output: int) -> float:
    """It comes when each of those that run has been replaced twice, between two ends; they are replaced behind it too."""
    noise = InstanceNoise(seed=1, instance="a", step_noise=STEP_NOISE_MIN, bias_max=0.0)
    engine = make(StepTiming(ROW, noise, 1.0).step_s, kv=KV_TOKENS, batch_max=batch_max, chunk=CHUNK_TOKENS)  # type: ignore[arg-type]
    for number in range(1, running + 1):
        engine.add(0.0, run(str(number), prompt, 1 + number * output // running))
    now_s, arrived_s, ends, number = 0.0, 0.0, [0.0], running
    while True:
        assert engine.next_due_s is not None
        now_s = max(now_s, engine.next_due_s)
        if not arrived_s and len(ends) > 2 * running + 8:
            now_s = arrived_s = ends[-1] + 0.5 * (ends[-1] - ends[-1 - running]) / running
            engine.advance(now_s)
            engine.add(now_s, run("0", prompt, output, arrival=number + 1))
        engine.advance(now_s)
        for each in engine.news():
            if each.done and each.run_id == "0":
                return now_s - arrived_s
            if each.done:
                ends.append(now_s)
                number += 1
                engine.add(now_s, run(str(number), prompt, output))


@pytest.mark.parametrize("seats", [0, 1])
@pytest.mark.parametrize(("prompt", "output"), [(100, 400), (250, 200), (1_000, 200)])
@pytest.mark.parametrize("running", [1, 16, 64, 256])
def test_a_request_in_a_running_batch_ends_when_the_plan_says(running: int, prompt: int, output: int, seats: int) -> None:
    """With a seat that is free, and behind a full batch."""
    sizes = running, running + seats, prompt, output
    assert predicted_s(*sizes) == pytest.approx(served_s(*sizes), rel=0.05)


def test_a_batch_with_more_requests_than_are_thought_to_fit_has_no_backlog() -> None:
    """Running requests are shorter than the model's on average: a seat is free when the next one ends, not when all but a batch have."""
    few = replace(ROW, kv_capacity_tokens=round(100.5 * 1_200))
    estimates = estimates_of(few, prompt=1_000, output=200)
    fits = estimates.service_of_all(slot("a"), "alpha")
    assert fits is not None
    assert fits.batch == pytest.approx(100.0, rel=1e-3)
    full, over = (estimates.engine(slot("a", running=running)).lead_s(crowd=300.0) for running in (100, 200))
    assert over < full < 0.1


@pytest.mark.parametrize(
    ("lookahead", "outputs", "produced"),
    [
        (0, (50, 0, 0), (10, 10, 60)),  # all that it has run
        (4, (50, 0, 0), (0, 0, 60)),  # two wait inside it
        (4, (50, 40, 0), (0, 50, 60)),
        (4, (50, 40, 30, 0), (10, 40, 50, 60)),  # more have output than seats: it takes turns
    ],
)
def test_requests_without_output_wait_inside_an_engine_with_lookahead_unless_it_takes_turns(
    lookahead: int, outputs: tuple[int, ...], produced: tuple[int, ...]
) -> None:
    """Reported ten tokens ago; two seats."""
    one, on = group(1, "alpha", 60.0), slot("a", running=len(outputs))
    on.facts = replace(on.facts, batch_max=2, lookahead_requests=lookahead)
    on.add_running(one, len(outputs))
    runs = GroupRuns(output_tokens=outputs, prompt_tokens=200 * len(outputs), prefill_left_tokens=200 * outputs.count(0))
    on.runs = ReportedRuns(at_s=START_S - 0.255, token_s=0.025, groups={one.group_id: runs})
    [view] = views_of(board_of([on], {}), [on], 0.0, START_S)
    [runner] = view.runners
    assert runner.produced_tokens == produced
