"""Estimated load of one incarnation, event by event."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from qlm_core.profiles.profile import HardwareProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import PREFILL_CHUNK_TOKENS, InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_estimator.speed import activity as module
from qlm_estimator.speed.activity import Activity
from qlm_estimator.speed.base_rows import BaseRows
from qlm_estimator.speed.factor import SpeedLearner

INSTANCE = InstanceFacts(name="a", incarnation="a/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=("chat",))


def _hardware() -> HardwareProfile:
    found = shipped_snapshot().hardware_for(INSTANCE, ModelSpec(name="chat", profile="Mistral-7B"))
    assert found is not None
    return found


HARDWARE = replace(_hardware(), prefill_ms_per_token_squared=0.0)  # 1,000 prompt tokens take 0.075 s
EVEN = replace(HARDWARE, decode_b_ms_per_seq=0.0, decode_c_ms_per_context_token=0.0)
"""All its steps take equally long, but those with a prefill."""
RATE = 1e3 / EVEN.decode_a_ms
SLOW_RATE = 1.0 / (1.0 / RATE + EVEN.prefill_work_s(PREFILL_CHUNK_TOKENS))
"""Steps a second, and while a prefill rides along."""
TRUE_SLOWDOWN = 1.1


def test_a_run_among_others() -> None:
    """B arrives at 10 and leaves at 30, A is there from 0 to 20, C from 20 on: beside B there are two except during prefills."""
    activity = Activity(since=(0, 0), running=0)
    activity.pull(0.0, "A", 1, 1_000, EVEN)
    activity.pull(10.0, "B", 1, 2_000, EVEN)
    activity.leave(20.0, "A", 20.0)
    activity.pull(20.0, "C", 1, 4_000, EVEN)
    found = activity.leave(30.0, "B", 29.5, 1_500, first_token_s=10.5)
    assert found is not None
    assert found.seconds == 19.0
    own_s, other_s = 0.15 + 2_000 / PREFILL_CHUNK_TOKENS / RATE, 0.3 + 4_000 / PREFILL_CHUNK_TOKENS / RATE  # the chunks ride along
    first, alone, last = (10.0 - own_s) * RATE, other_s * SLOW_RATE, (10.0 - other_s) * RATE
    steps = first + alone + last
    assert found.sequences == pytest.approx((2 * first + alone + 2 * last) / steps)
    # A's tokens from before, and those of each at the middle of its time beside B.
    held = (
        first * (3_000 + 9.925 * RATE + own_s * SLOW_RATE + first)
        + alone * (2_000 + first + alone / 2)
        + last * (6_000 + first + alone + last)
    )
    assert found.context_tokens == pytest.approx(held / steps)
    assert found.prefill_tokens == 4_000, "behind it"


def test_prefills_come_one_after_the_other() -> None:
    activity = Activity(since=(0, 0), running=0)
    for name in "ABCD":
        activity.pull(0.0, name, 1, 10_000, HARDWARE)
    first = activity.leave(1.0, "A", 1.0)
    assert first is not None
    assert first.sequences == pytest.approx(1.0)
    assert activity.leave(1.2, "D", 1.2) is None, "its prefill was not its turn yet"


def test_those_that_nobody_knows_are_counted() -> None:
    activity = Activity(since=(5_000, 3), running=2)
    assert not activity.covers((5_000, 3))
    assert activity.covers((5_000, 4))
    activity.pull(5.0, "A", 1, 1_000, EVEN)
    assert activity.leave(10.0, "X", 10.0) is None
    found = activity.leave(15.0, "A", 15.0)
    assert found is not None
    own_s = 0.075 + 1_000 / PREFILL_CHUNK_TOKENS / RATE  # its chunk rides along with the two
    three_s, whole_s = 5.0 - own_s, 10.0 - own_s
    assert found.sequences == pytest.approx((3 * three_s + 2 * 5.0) / whole_s)
    made = (3 * three_s**2 / 2 + 2 * (whole_s**2 - three_s**2) / 2) * RATE
    assert found.context_tokens == pytest.approx(1_000 * found.sequences + made / whole_s), "each holds as much as the one that is known"
    activity.leave(16.0, "Y", 16.0)
    activity.leave(17.0, "Z", 17.0)
    activity.pull(20.0, "B", 1, 1_000, EVEN)
    alone = activity.leave(25.0, "B", 25.0)
    assert alone is not None
    assert alone.sequences == pytest.approx(1.0), "no more left than there were"


def test_what_all_have_made_follows_from_the_steps_that_are_learned() -> None:
    """An engine with a step of 0.05 s, then of 0.1 s. Every 20 steps a request of 100 tokens starts, every tenth has 2,000. Context held
    beside each is followed to a tenth, on both sides of the change."""
    activity = Activity(since=(0, 0), running=0)
    row = replace(HARDWARE, prefill_ms_per_token=0.0, decode_b_ms_per_seq=0.0, decode_c_ms_per_context_token=0.0)
    speed = SpeedLearner(base=BaseRows(shipped=(row,), facts={}), rows_max=1)
    running: dict[str, tuple[int, int, int]] = {}  # prompt, output, made
    first_s: dict[str, float] = {}
    held: dict[str, list[int]] = {}
    now_s, errors = 0.0, list[tuple[float, float]]()
    for step in range(12_000):
        if step % 20 == 0:
            name = str(step)
            running[name], held[name] = (500, 2_000 if step % 200 == 0 else 100, 0), []
            activity.pull(now_s, name, 1, 500, speed.hardware(INSTANCE, row.model))
        context = sum(prompt + made for prompt, _, made in running.values())
        now_s += 0.05 if step < 6_000 else 0.1
        for name, (prompt, output, made) in list(running.items()):
            held[name].append(context)
            first_s.setdefault(name, now_s)
            running[name] = (prompt, output, made + 1)
            if made + 1 == output:
                del running[name]
                found = activity.leave(now_s, name, now_s, output, first_s[name])
                assert found is not None
                speed.add(INSTANCE, row.model, found, output)
                errors.append((now_s, found.context_tokens / (sum(held[name]) / len(held[name])) - 1.0))
    late = [error for at_s, error in errors if 200.0 < at_s < 300.0 or at_s > 700.0]
    assert len(late) > 150
    assert max(map(abs, late)) < 0.1


def test_a_batch_that_fills_and_drains_is_no_faster() -> None:
    """120 requests at once, stepped: most of the seconds pass while it fills, most of the steps are made while it drains. The speed that is
    learned is the engine's."""
    count, prompt = 120, 1_500
    outputs = [2 + round(-150.0 * math.log((number + 0.5) / count)) for number in range(count)]
    activity = Activity(since=(0, 0), running=0)
    speed = SpeedLearner(base=BaseRows(shipped=(HARDWARE,), facts={}), rows_max=1)
    now_s = 0.0
    for batch in range(6):
        for number in range(count):
            activity.pull(now_s, f"{batch}/{number}", 1, prompt, speed.hardware(INSTANCE, HARDWARE.model))
        filled, made, first_s = 0, [0] * count, [0.0] * count
        while made != outputs:
            decoding = [number for number in range(filled // prompt) if made[number] < outputs[number]]
            chunk = min(PREFILL_CHUNK_TOKENS, count * prompt - filled)
            step_s = HARDWARE.prefill_work_s(chunk)
            if decoding:
                step_s += HARDWARE.decode_step_s(float(len(decoding)), float(sum(prompt + made[number] for number in decoding)))
            now_s += TRUE_SLOWDOWN * step_s
            for number in range(filled // prompt, (filled + chunk) // prompt):
                first_s[number], made[number] = now_s, 1
            filled += chunk
            for number in decoding:
                made[number] += 1
                if made[number] == outputs[number]:
                    run = activity.leave(now_s, f"{batch}/{number}", now_s, made[number], first_s[number])
                    if run is not None:
                        speed.add(INSTANCE, HARDWARE.model, run, made[number])
    learned = speed.hardware(INSTANCE, HARDWARE.model)
    assert learned is not None
    assert learned.slowdown == pytest.approx(TRUE_SLOWDOWN, rel=0.015)


def test_idle_time_counts_for_nobody() -> None:
    activity = Activity(since=(0, 0), running=0)
    activity.pull(0.0, "A", 1, 1_000, HARDWARE)
    activity.leave(10.0, "A", 10.0)
    activity.pull(1_000.0, "B", 1, 1_000, HARDWARE)
    found = activity.leave(1_010.0, "B", 1_010.0, first_token_s=1_000.5)
    assert found is not None
    assert (found.seconds, found.sequences) == pytest.approx((9.5, 1.0))


def test_time_that_goes_back_counts_as_none() -> None:
    activity = Activity(since=(0, 0), running=0)
    activity.pull(0.0, "A", 1, 1_000, EVEN)
    activity.pull(0.0, "B", 1, 1_000, EVEN)
    activity.leave(20.0, "nobody", 20.0)
    activity.leave(5.0, "B", 5.0)
    found = activity.leave(30.0, "A", 30.0)
    assert found is not None
    steps = 2 * 19.85 * RATE + 0.075 * SLOW_RATE + 10.0 * RATE  # two until 20, one from then on
    assert found.sequences == pytest.approx(steps / (29.85 * RATE + 0.075 * SLOW_RATE), rel=1e-3)


def test_the_same_pull_again_replaces_the_first() -> None:
    activity = Activity(since=(0, 0), running=0)
    activity.pull(0.0, "A", 1, 1_000, HARDWARE)
    activity.pull(10.0, "A", 2, 1_000, HARDWARE)
    found = activity.leave(20.0, "A", 20.0, first_token_s=10.5)
    assert found is not None
    assert (found.run.attempt, found.seconds, found.sequences) == pytest.approx((2, 9.5, 1.0))


def test_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNS_MAX", 10)
    activity = Activity(since=(0, 0), running=0)
    for number in range(30):
        activity.pull(0.0, str(number), 1, 1, HARDWARE)
    assert sum(activity.holds(str(number)) for number in range(30)) == 10
    for number in range(29):
        activity.leave(100.0, str(number), 100.0)
    activity.pull(200.0, "late", 1, 1, HARDWARE)
    found = activity.leave(300.0, "late", 300.0)
    assert found is not None
    assert found.sequences == pytest.approx(2.0, abs=1e-3), "the one that is left is still counted"


def test_requests_wait_inside_an_engine_with_lookahead() -> None:
    """Two seats, four requests: C and D begin as A and B leave, and beside each there is one other all the time."""
    activity = Activity(since=(0, 0), running=0)
    for name in "ABCD":
        activity.pull(0.0, name, 1, 1_000, EVEN, 2)
    first = activity.leave(10.0, "A", 10.0, round(9.9 * RATE), first_token_s=0.1)
    assert first is not None
    assert first.sequences == pytest.approx(2.0, abs=0.05)
    overtaking = activity.leave(20.0, "D", 20.0, 500, first_token_s=10.1)
    assert overtaking is not None, "taken to wait still, so beside it there were those of its whole stay"
    assert overtaking.sequences == pytest.approx(2.0, abs=0.05)
    assert first.prefill_tokens == pytest.approx(1_000, rel=0.1), "that of B; C waits for a seat"


def test_kv_holds_prompts_back_in_an_engine_with_lookahead() -> None:
    small = replace(EVEN, kv_capacity_tokens=5_000)
    activity = Activity(since=(0, 0), running=0)
    for name in "AB":
        activity.pull(0.0, name, 1, 2_900, small, 64)
    found = activity.leave(10.0, "A", 10.0, 500, first_token_s=0.5)
    assert found is not None
    assert found.sequences == pytest.approx(1.0)


@pytest.mark.parametrize(("paused_s", "seconds"), [(0.0, 9.0), (4.0, 0.0), (-1.0, 0.0), (math.nan, 0.0)])
def test_a_run_that_was_paused_has_no_seconds_of_steps(paused_s: float, seconds: float) -> None:
    activity = Activity(since=(0, 0), running=0)
    activity.pull(0.0, "A", 1, 1_000, EVEN)
    found = activity.leave(10.0, "A", 10.0, 100, first_token_s=1.0, paused_s=paused_s)
    assert found is not None
    assert found.seconds == seconds
