"""Profiles: arithmetic of a hardware row, which row a lookup finds, and how few samples lean on wider classes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm.api.v1 import estimator_pb2
from qlm_core.profiles.hardware_prior import hardware_prior
from qlm_core.profiles.hardware_profile import FIGURE_MAX
from qlm_core.profiles.profile import PRIOR_SAMPLES, WORKLOAD_PRIOR, HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.profiles.workload_profile import WIDER_SAMPLES
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelFacts, ModelSpec
from qlm_process.wire import profile as profile_wire

SHIPPED = shipped_snapshot()
A100 = InstanceFacts(name="a", incarnation="a/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=("chat",))
CHAT = ModelSpec(name="chat", profile="Mistral-7B")


def _row() -> HardwareProfile:
    found = SHIPPED.hardware_for(A100, CHAT)
    assert found is not None
    return found


def _workload(samples: int, output: float, *, slo_class: str = "", token_class: str = "", variance: float = 0.0) -> WorkloadProfile:
    return WorkloadProfile(
        model="chat",
        slo_class=slo_class,
        token_class=token_class,
        prompt_tokens_mean=100.0,
        prompt_tokens_variance=0.0,
        output_tokens_mean=output,
        output_tokens_variance=variance,
        samples=samples,
    )


def test_durations_of_the_a100_row() -> None:
    row = _row()
    assert row.decode_step_s(32, 16_000) == pytest.approx((12.0 + 0.07 * 32 + 0.00011 * 16_000) / 1e3)
    assert row.prefill_s(1000) == pytest.approx((8.0 + 75.0 + 1.7) / 1e3)
    assert row.prefill_work_s(1000) == pytest.approx(0.075)
    assert row.prefill_work_s(1000, 500.0**2 + 500.0**2) == pytest.approx(0.075 + 0.00085)
    assert row.swap_s(warm=True) == 0.84
    assert row.swap_s(warm=False) == pytest.approx(5.34)


def test_slowdown_stretches_work_and_not_loads() -> None:
    slow = replace(_row(), slowdown=1.5)
    assert slow.decode_step_s(8, 4_000) == pytest.approx(1.5 * _row().decode_step_s(8, 4_000))
    assert slow.prefill_s(500) == pytest.approx(1.5 * _row().prefill_s(500))
    assert slow.swap_s(warm=False) == _row().swap_s(warm=False)


@given(st.floats(1.0, 1e5), st.floats(0.3, 8.0), st.floats(1.0, 1e4))
def test_runs_alone_give_the_row_without_its_prior(prior_s: float, factor: float, predicted_s: float) -> None:
    """slowdown = (measured + prior) / (predicted + prior), as docs/reference/profiles.md has it."""
    learned = replace(
        _row(),
        instance="a",
        samples=40,
        slowdown=(factor * predicted_s + prior_s) / (predicted_s + prior_s),
        prior_share=prior_s / (predicted_s + prior_s),
    )
    row = learned.as_measured()
    assert row.decode_step_s(8, 4_000) == pytest.approx(factor * _row().decode_step_s(8, 4_000), rel=1e-6)
    assert row.prefill_s(500) == pytest.approx(factor * _row().prefill_s(500), rel=1e-6)
    assert row.swap_s(warm=False) == _row().swap_s(warm=False)
    assert (row.key, row.instance, row.samples, row.origin) == (_row().key, "", 0, "measured")
    assert (row.slowdown, row.prior_share) == (1.0, 0.0)


@pytest.mark.parametrize(
    "change",
    [{}, {"instance": "a", "prior_share": 1.0}, {"instance": "a", "samples": 9, "slowdown": 0.5, "prior_share": 0.6}],
)
def test_without_runs_nothing_was_measured(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"runs of an instance|contradicts"):
        replace(_row(), **change).as_measured()  # type: ignore[arg-type]


@given(st.floats(0.01, 1000.0))
def test_a_time_scale_divides_every_duration(scale: float) -> None:
    fast = _row().scaled(scale)
    assert fast.decode_step_s(8, 4_000) == pytest.approx(_row().decode_step_s(8, 4_000) / scale)
    assert fast.prefill_s(500) == pytest.approx(_row().prefill_s(500) / scale)
    assert fast.swap_s(warm=False) == pytest.approx(_row().swap_s(warm=False) / scale)
    assert fast.kv_swap_us_per_token == pytest.approx(_row().kv_swap_us_per_token / scale)
    assert fast.kv_capacity_tokens == _row().kv_capacity_tokens


def test_figures_that_may_be_stay_what_may_be_by_a_slow_clock() -> None:
    """An absurd row that was imported must not stop whoever predicts with it."""
    slow = replace(_row(), decode_a_ms=FIGURE_MAX, kv_swap_base_ms=2e6).scaled(1e-6)
    assert (slow.decode_a_ms, slow.kv_swap_base_ms) == (FIGURE_MAX, FIGURE_MAX)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_scale_is_above_zero(scale: float) -> None:
    with pytest.raises(ValueError, match="time scale"):
        _row().scaled(scale)


def test_a_learned_row_wins_on_its_own_instance_and_gpus_only() -> None:
    learned = replace(_row(), instance="a", slowdown=1.2, samples=50)
    snapshot = ProfileSnapshot(version=1, made_s=1.0, hardware=(*SHIPPED.hardware, learned))
    assert snapshot.hardware_for(A100, CHAT) == learned
    other = replace(A100, name="b")
    assert snapshot.hardware_for(other, CHAT) == _row()
    moved = replace(A100, gpu="H100-80GB")
    found = snapshot.hardware_for(moved, CHAT)
    assert found is not None
    assert (found.gpu, found.slowdown) == ("H100-80GB", 1.0)
    grown = snapshot.hardware_for(replace(A100, n_gpu=2), CHAT)
    assert grown is not None
    assert (grown.n_gpu, grown.slowdown) == (2, 1.0)


def test_an_unknown_pair_has_no_hardware() -> None:
    assert SHIPPED.hardware_for(replace(A100, gpu="B300"), CHAT) is None
    assert SHIPPED.hardware_for(A100, replace(CHAT, profile="Llama-2-70B")) is None  # known, and too big for one
    assert SHIPPED.hardware_for(A100, replace(CHAT, profile="Unheard-of")) is None


def test_a_pair_never_seen_has_what_follows_from_facts() -> None:
    fast = replace(A100, gpu="H200", time_scale=2.0)
    found, prior = SHIPPED.hardware_for(fast, CHAT), hardware_prior("H200", 1, "Mistral-7B")
    assert prior is not None
    assert found == prior.scaled(2.0)
    assert SHIPPED.hardware_of_pair("H200", 1, CHAT) == prior
    facts = ModelFacts(parameters_billion=1.0, layers=16, hidden_size=2048, kv_heads=8, head_size=64)
    own = SHIPPED.hardware_for(A100, ModelSpec(name="own", profile="Unheard-of", facts=facts))
    assert own is not None
    assert (own.origin, own.weights_gb) == ("facts", 2.0)


def test_a_row_of_the_pair_stands_before_facts() -> None:
    measured = replace(_row(), gpu="H200", origin="measured")
    snapshot = ProfileSnapshot(version=1, made_s=1.0, hardware=(*SHIPPED.hardware, measured))
    assert snapshot.hardware_for(replace(A100, gpu="H200"), CHAT) == measured


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prior_share", -0.1),
        ("prior_share", 1.1),
        ("prior_share", float("nan")),
        ("origin", "hearsay"),
        ("prefill_ms_per_token_squared", float("inf")),
        ("decode_a_ms", 0.0),
        ("decode_b_ms_per_seq", -1.0),
        ("slowdown", 0.0),
        ("slowdown", float("nan")),
    ],
)
def test_figures_that_no_row_has_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        replace(_row(), **{field: value})  # type: ignore[arg-type]


def test_without_data_the_prior_is_believed() -> None:
    assert SHIPPED.workload_for("chat", "32s", "256") == WORKLOAD_PRIOR


def test_a_class_leans_on_its_model_and_that_on_the_prior() -> None:
    weight = 30 / (30 + PRIOR_SAMPLES)
    of_model = _workload(30, 500.0)
    of_class = _workload(10, 50.0, slo_class="32s", token_class="256")
    snapshot = ProfileSnapshot(version=1, made_s=1.0, hardware=(), workload=(of_class, of_model))
    model_mean = weight * 500.0 + (1.0 - weight) * WORKLOAD_PRIOR.output_tokens_mean
    assert snapshot.workload_for("chat", "64s", "1024").output_tokens_mean == pytest.approx(model_mean)
    weight = 10 / (10 + WIDER_SAMPLES)
    found = snapshot.workload_for("chat", "32s", "256")
    assert found.output_tokens_mean == pytest.approx(weight * 50.0 + (1.0 - weight) * model_mean)
    assert found.samples == 10


@given(st.integers(0, 10_000), st.floats(1.0, 5_000.0), st.floats(0.0, 1e6))
def test_a_blend_lies_between_the_prior_and_the_data(samples: int, mean: float, variance: float) -> None:
    snapshot = ProfileSnapshot(version=1, made_s=1.0, hardware=(), workload=(_workload(samples, mean, variance=variance),))
    found = snapshot.workload_for("chat", "", "")
    low, high = sorted((mean, WORKLOAD_PRIOR.output_tokens_mean))
    assert low - 1e-6 <= found.output_tokens_mean <= high + 1e-6
    # The variance of a mixture is at least the mean of its variances.
    weight = samples / (samples + PRIOR_SAMPLES)
    assert found.output_tokens_variance >= (weight * variance + (1 - weight) * WORKLOAD_PRIOR.output_tokens_variance) * (1 - 1e-9)


def test_many_samples_speak_for_themselves() -> None:
    snapshot = ProfileSnapshot(version=1, made_s=1.0, hardware=(), workload=(_workload(10**9, 77.0),))
    assert snapshot.workload_for("chat", "32s", "256").output_tokens_mean == pytest.approx(77.0, rel=1e-4)


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1.0, -1.0), (1.0, float("inf"))])
def test_impossible_workload_is_refused(mean: float, variance: float) -> None:
    with pytest.raises(ValueError, match="workload profile"):
        _workload(1, mean, variance=variance)


def test_a_snapshot_survives_the_wire() -> None:
    learned = replace(_row(), instance="a", slowdown=1.2, samples=50)
    workload = (replace(_workload(30, 500.0, slo_class="32s", token_class="256"), uncached_share=0.25),)
    snapshot = ProfileSnapshot(version=7, made_s=1234.5, hardware=(*SHIPPED.hardware, learned), workload=workload)
    assert profile_wire.from_body(profile_wire.to_body(snapshot)) == snapshot
    assert profile_wire.to_body(snapshot) == profile_wire.to_body(profile_wire.from_body(profile_wire.to_body(snapshot)))


def test_a_row_of_an_older_version_says_nothing_of_caches() -> None:
    message = profile_wire.to_proto(ProfileSnapshot(version=1, made_s=0.0, hardware=(), workload=(_workload(30, 500.0),)))
    message.workload[0].ClearField("uncached_share")
    assert profile_wire.from_proto(message).workload[0].uncached_share == 1.0
    for wrong in (-0.5, 1.5, float("nan")):
        message.workload[0].uncached_share = wrong
        with pytest.raises(ValueError, match="uncached_share"):
            profile_wire.from_proto(message)


def test_bad_bytes_and_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="ProfileSnapshot"):
        profile_wire.from_body(b"\xff\xff\xff")
    message = profile_wire.to_proto(SHIPPED)
    message.hardware[0].decode_a_ms = float("nan")
    with pytest.raises(ValueError, match="decode_a_ms"):
        profile_wire.from_body(message.SerializeToString())


def test_every_field_of_the_messages_is_carried() -> None:
    assert {field.name for field in estimator_pb2.HardwareProfile.DESCRIPTOR.fields} == {
        field for field in HardwareProfile.__slots__ if not field.startswith("_")
    }
    assert {field.name for field in estimator_pb2.WorkloadProfile.DESCRIPTOR.fields} == set(WorkloadProfile.__slots__)
