"""Figures from the runs of a profiling experiment: worked out by hand for an engine whose steps are known."""

from __future__ import annotations

import pytest

from qlm_agent.engines.port import TokenPrompt
from qlm_agent.profiling.experiment import windows_of
from qlm_agent.profiling.runs import ProfiledRun

STEP_S = 0.1


def run_of(first_s: float, tokens: int, *, prompt_tokens: int = 100, every: int = 1, slower_from_s: float = 1e9) -> ProfiledRun:
    """A run that made a token each STEP_S, reported at every so many of them and at the end; twice as long each from a time on."""
    run = ProfiledRun(
        run_id=f"at {first_s}", prompt_tokens=prompt_tokens, output_tokens=tokens, prompt=TokenPrompt(ids=[7] * prompt_tokens)
    )
    run.started_s, run.first_s, run.ended = first_s - 0.05, first_s, True
    at_s = first_s
    for made in range(1, tokens + 1):
        if made % every == 0 or made == tokens:
            run.points.append((at_s, made))
        at_s += 2.0 * STEP_S if at_s >= slower_from_s else STEP_S
    return run


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_steps_are_counted_while_all_of_a_batch_decode(scale: float) -> None:
    """The third begins at 1.2 s; the first ends at 2.9 s, after which steps are quicker for the others or, here, slower."""
    runs = [run_of(begins_s, 20, slower_from_s=2.95) for begins_s in (1.0, 1.1, 1.2)]
    windows = windows_of(runs, scale)
    assert len(windows) == 4
    assert sum(window.steps for window in windows) == pytest.approx(17.0)
    assert sum(window.seconds for window in windows) == pytest.approx(1.7 * scale)
    # Three prompts, and at 1.2 s one, two and three tokens; each makes one in each step.
    made = 6.0
    for window in windows:
        assert window.sequences == 3
        assert window.seconds / window.steps == pytest.approx(STEP_S * scale)
        assert window.context_tokens == pytest.approx(300.0 + made + 3.0 * window.steps / 2.0)
        made += 3.0 * window.steps


def test_an_engine_that_reports_seldom_is_read_between_its_reports() -> None:
    (window,) = windows_of([run_of(begins_s, 30, every=30) for begins_s in (1.0, 1.1, 1.2)], 1.0)
    assert window.seconds / window.steps == pytest.approx(STEP_S, rel=0.01)
    assert window.steps == pytest.approx(27.0, rel=0.01)


def test_runs_that_never_decoded_together_measure_nothing() -> None:
    assert windows_of([run_of(1.0, 5), run_of(3.0, 5)], 1.0) == []
