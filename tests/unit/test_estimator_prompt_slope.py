"""How outputs follow prompts within a class."""

from __future__ import annotations

import numpy as np
import pytest

from qlm_core.workload_profile import WorkloadProfile
from qlm_estimator.lengths import LengthLearner
from qlm_estimator.prompt_slope import PromptSlope


def after(prompts: list[float], outputs: list[float], memory: float = 1_000.0) -> PromptSlope:
    slope = PromptSlope()
    for prompt, output in zip(prompts, outputs, strict=True):
        slope.add(prompt, output, memory)
    return slope


def test_a_line_is_learned() -> None:
    rng = np.random.default_rng(1)
    prompts = rng.uniform(257.0, 1_024.0, 1_000)
    outputs = 300.0 - 0.25 * prompts + rng.normal(0.0, 50.0, 1_000)
    assert after(prompts.tolist(), outputs.tolist()).tokens == pytest.approx(-0.25, abs=0.02)


def test_chance_is_no_line() -> None:
    rng = np.random.default_rng(2)
    found = [abs(after(rng.uniform(257.0, 1_024.0, 40).tolist(), rng.lognormal(5.0, 1.0, 40).tolist()).tokens) for _ in range(200)]
    plain = [abs(np.polyfit(rng.uniform(257.0, 1_024.0, 40), rng.lognormal(5.0, 1.0, 40), 1)[0]) for _ in range(200)]
    assert np.mean(np.array(found) == 0.0) > 0.5
    assert np.mean(found) < 0.6 * np.mean(plain)


@pytest.mark.parametrize("prompts", [[], [500.0], [500.0] * 30])
def test_without_a_spread_there_is_no_line(prompts: list[float]) -> None:
    assert after(prompts, [100.0] * len(prompts)).tokens == 0.0
    assert after(prompts, np.linspace(1.0, 900.0, len(prompts)).tolist()).tokens == 0.0


def test_old_finishes_fade() -> None:
    prompts = np.tile([300.0, 600.0, 900.0], 400)
    rises, falls = (100.0 + 0.5 * prompts).tolist(), (700.0 - 0.5 * prompts).tolist()
    assert after([*prompts, *prompts], [*rises, *falls], memory=100.0).tokens == pytest.approx(-0.5, abs=0.01)


def finish(learner: LengthLearner, prompt: int, output: int) -> None:
    learner.finish(learner.classes("chat", "", "1024"), prompt, output)


def row_of(learner: LengthLearner) -> WorkloadProfile:
    return next(row for row in learner.profiles() if row.token_class == "1024")


def test_a_class_publishes_its_line_and_goes_on_from_it() -> None:
    learner = LengthLearner(memory=1_000.0, rows_max=10)
    for number in range(300):
        finish(learner, 300 + 300 * (number % 3), 100 + 50 * (number % 3))
    row = row_of(learner)
    assert row.output_per_prompt_token == pytest.approx(1.0 / 6.0, rel=0.01)
    later = LengthLearner(memory=1_000.0, rows_max=10)
    later.restore((row,))
    finish(later, 600, 150)
    assert row_of(later).output_per_prompt_token == pytest.approx(row.output_per_prompt_token, rel=0.05)


def test_a_line_is_given_up_with_what_was_learned_before_a_change() -> None:
    learner = LengthLearner(memory=1_000.0, rows_max=10)
    for number in range(300):
        finish(learner, 300 + 300 * (number % 3), 100 + 50 * (number % 3))
    learner.forget("chat", 5.0)
    for number in range(60):
        finish(learner, 300 + 300 * (number % 3), 500 - 50 * (number % 3))
    assert row_of(learner).output_per_prompt_token < -0.1


def test_one_absurd_output_does_not_turn_the_line() -> None:
    learner = LengthLearner(memory=1_000.0, rows_max=10)
    for number in range(300):
        finish(learner, 300 + 300 * (number % 3), 100 + 50 * (number % 3))
    before = row_of(learner).output_per_prompt_token
    finish(learner, 900, 100_000)
    assert row_of(learner).output_per_prompt_token == pytest.approx(before, rel=0.25)


def test_one_absurd_prompt_does_not_poison_a_class() -> None:
    learner = LengthLearner(memory=1_000.0, rows_max=10)
    for _ in range(200):
        finish(learner, 500, 100)
    finish(learner, 100_000, 100)
    row = row_of(learner)
    assert row.prompt_tokens_mean < 550.0
    assert row.prompt_tokens_variance < 500.0**2
