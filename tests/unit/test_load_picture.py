"""The picture of a run: its parts, and the page that needs no network."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.request import SloKind
from qlm_load.demo.settings import DemoConfig, demo_config_path
from qlm_load.picture import palette, spans
from qlm_load.picture.command import picture
from qlm_load.picture.figure import draw
from qlm_load.picture.page import page, page_data
from qlm_load.picture.recorder import class_names, merged
from qlm_load.picture.recording import ClusterFrame, EndMark, InstanceFrame, KillMark, QueuedPart, Recording, load, save
from qlm_load.picture.spans import Mark, Span
from qlm_load.workload.options import demo_workload
from qlm_process.cluster.view import GroupView
from qlm_process.config import load_config

MODELS = ("mistral-7b", "</script><b>")
"""Names come from a configuration; one that is markup must stay text."""


def instance(
    model: str = MODELS[0], *, up: bool = True, swapping_to: str = "", queue: tuple[tuple[str, str, int], ...] = (), **counts: int
) -> InstanceFrame:
    return InstanceFrame(
        up=up,
        model=model if up else "",
        swapping_to=swapping_to,
        running=3,
        kv_share=0.5,
        queue=tuple(QueuedPart(model=part, slo_class=name, waiting=waiting) for part, name, waiting in queue),
        operations=dict(counts) if up else None,
    )


def frame(
    at_s: float, seen: InstanceFrame, *, serving: tuple[str, ...] = ("planner-0", "a100-0"), unplaced: int | None = 0
) -> ClusterFrame:
    return ClusterFrame(at_s=at_s, unplaced=unplaced, plan_version=7, instances={"a100-0": seen}, serving=serving)


@pytest.fixture
def recording() -> Recording:
    head = ((MODELS[0], "interactive", 2), (MODELS[1], "batch-2", 6))
    return Recording(
        title="a test",
        time_scale=4.0,
        models=MODELS,
        classes={"interactive": 20.0, "batch-2": 3600.0},
        processes=("server", "planner-0", "a100-0"),
        frames=(
            frame(0.0, instance(queue=head, evicted=0)),
            frame(1.0, instance(queue=head, swapping_to=MODELS[1], evicted=2)),
            frame(2.0, instance(up=False, queue=head), serving=("planner-0",), unplaced=None),
            frame(3.0, instance(MODELS[1], evicted=1), serving=("a100-0",), unplaced=9),
            frame(4.0, instance(MODELS[1], evicted=1)),
        ),
        kills=(
            KillMark(process="a100-0", at_s=1.9, held=50, up_after_s=1.0),
            KillMark(process="planner-0", at_s=2.5, held=60, up_after_s=None),
        ),
        ends=tuple(EndMark(at_s=0.5 * number, slo_class="interactive", attained=number % 2 == 0) for number in range(8)),
    )


def test_the_head_of_the_queue_is_at_the_bottom_of_the_image(recording: Recording) -> None:
    assert spans.waiting_max(recording) == 8
    image = spans.queue_image(recording, "a100-0", 8)
    assert image.shape == (8, 5, 4)
    classes = list(recording.classes)
    first = (*palette.shade(MODELS, classes, MODELS[0], "interactive"), 1.0)
    last = (*palette.shade(MODELS, classes, MODELS[1], "batch-2"), 1.0)
    assert all(np.allclose(image[row, 0], first) for row in (0, 1))
    assert all(np.allclose(image[row, 0], last) for row in range(2, 8))
    assert not image[:, 4].any()


def test_a_long_queue_has_several_requests_in_a_row_of_the_image(recording: Recording) -> None:
    long = replace(recording, frames=(frame(0.0, instance(queue=((MODELS[0], "interactive", 5_000),))), frame(1.0, instance())))
    image = spans.queue_image(long, "a100-0", spans.waiting_max(long))
    assert image.shape[0] == spans.ROWS_MAX
    assert image[:, 0, 3].all()


def test_spans_say_when_a_model_was_active_swapped_and_away(recording: Recording) -> None:
    assert spans.model_spans(recording, "a100-0") == [
        Span(from_s=0.0, to_s=1.0, label=MODELS[0]),
        Span(from_s=1.0, to_s=3.0, label=""),
        Span(from_s=3.0, to_s=4.0, label=MODELS[1]),
    ]
    assert spans.model_swap_spans(recording, "a100-0") == [Span(from_s=1.0, to_s=2.0, label=MODELS[1])]
    assert spans.down_spans(recording, "a100-0") == [Span(from_s=2.0, to_s=3.0, label="down")]
    assert spans.serving_spans(recording, "planner-0") == [
        Span(from_s=0.0, to_s=3.0, label="planner-0"),
        Span(from_s=4.0, to_s=4.0, label="planner-0"),
    ]


def test_counters_that_begin_anew_are_marked_too(recording: Recording) -> None:
    assert spans.operation_marks(recording, "a100-0") == [
        Mark(at_s=1.0, what="evicted", count=2),
        Mark(at_s=3.0, what="evicted", count=1),
    ]
    assert spans.operation_counts(recording, "a100-0") == {"evicted": 3}


def test_what_is_not_known_is_not_drawn(recording: Recording) -> None:
    assert spans.unplaced(recording) == ([0.0, 1.0, 3.0, 4.0], [0, 0, 9, 0])


def test_attainment_over_time_and_in_all(recording: Recording) -> None:
    times, shares = spans.attainment(recording, "interactive")
    by_time = dict(zip(times, shares, strict=True))
    assert math.isnan(by_time[1.0])  # three have ended: too few
    assert by_time[2.0] == 0.6
    assert by_time[3.5] == 0.5
    assert spans.attained_share(recording, "interactive") == 0.5
    assert spans.attained_share(recording, "batch-2") is None


def test_a_recording_is_read_back_as_it_was(recording: Recording, tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    save(recording, path)
    assert load(path) == recording
    for wrong in ("{}", "[]", '{"format": 99}', "nothing"):
        path.write_text(wrong)
        with pytest.raises(ConfigError):
            load(path)


def test_the_picture_has_axes_for_each_instance_and_labels_within_it(recording: Recording) -> None:
    figure = draw(recording)
    labels = [str(ax.get_label()) for ax in figure.axes]
    assert labels == ["queue:a100-0", "band:a100-0", "unplaced", "share", "processes"]
    lefts = {round(ax.get_position().x0, 6) for ax in figure.axes}
    rights = {round(ax.get_position().x1, 6) for ax in figure.axes}
    assert len(lefts) == len(rights) == 1  # one time axis for all
    assert all(0.0 < ax.get_position().y0 < ax.get_position().y1 < 1.0 for ax in figure.axes)


def test_a_run_without_frames_is_drawn_too(recording: Recording) -> None:
    empty = replace(recording, frames=(), kills=(), ends=())
    assert [str(ax.get_label()) for ax in draw(empty).axes] == ["unplaced", "share", "processes"]


def test_the_page_needs_no_network_and_keeps_names_as_text(recording: Recording) -> None:
    figure = draw(recording)
    text = page(figure, recording, ("a <caption>", [["", "QLM"], ["swaps", "<3>"]]))
    assert "<svg" in text
    assert "a &lt;caption&gt;" in text
    assert "&lt;3&gt;" in text
    assert "<b>" not in text
    # Addresses occur only as names of XML vocabularies, never where something would be loaded.
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!\#|data:)""", text)
    assert not re.search(r"@import|url\((?!\#)", text)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert json.loads(data[1]) == json.loads(json.dumps(page_data(figure, recording)))
    assert text.count("<script") == text.count("</script>") == 2


def test_the_page_data_are_what_was_recorded(recording: Recording) -> None:
    data = json.loads(json.dumps(page_data(draw(recording), recording)))
    assert 0.0 < data["left"] < data["right"] < 1.0
    assert 0.0 < data["top"] < data["bottom"] < 1.0
    assert [kind["name"] for kind in data["kinds"]] == [f"{model}, {name}" for model in MODELS for name in ("interactive", "batch-2")]
    assert [frame["t"] for frame in data["frames"]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert data["frames"][0]["instances"]["a100-0"]["queue"] == [[0, 2], [3, 6]]
    assert data["kills"] == [{"process": "a100-0", "t": 1.9, "up": 1.0}, {"process": "planner-0", "t": 2.5, "up": None}]


def test_the_command_draws_a_recording_again(recording: Recording, tmp_path: Path) -> None:
    save(recording, tmp_path / "recording.json")
    result = CliRunner().invoke(picture, [str(tmp_path / "recording.json"), "--out", str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "new" / "queues.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "new" / "queues.html").read_text()
    (tmp_path / "recording.json").write_text("{}")
    assert CliRunner().invoke(picture, [str(tmp_path / "recording.json")]).exit_code == 2


def test_neighbouring_groups_that_are_alike_are_one_part() -> None:
    def group(model: str, slo_class: str, waiting: int) -> GroupView:
        return GroupView(
            group_id="g", model=model, slo_kind=SloKind.COMPLETION, slo_class=slo_class, waiting=waiting, first_deadline_s=0.0,
            completion_p50_s=None, completion_p90_s=None,
        )  # fmt: skip

    groups = [group("a", "8s", 1), group("a", "8s", 2), group("b", "8s", 0), group("a", "8s", 4), group("a", "64s", 1)]
    assert [(part.model, part.slo_class, part.waiting) for part in merged(groups, {"8s": "interactive"})] == [
        ("a", "interactive", 7),
        ("a", "64s", 1),
    ]


def test_classes_are_called_as_the_workload_calls_them() -> None:
    workload = demo_workload(load_config(DemoConfig, demo_config_path(), overrides={"load.requests": 50}), None, None)
    assert class_names(workload, 4.0) == {"1024s": "batch-2", "16s": "batch-1", "8s": "interactive"}
    assert class_names(workload, 1.0) == {"4096s": "batch-2", "64s": "batch-1", "32s": "interactive"}


def test_colours_of_models_and_classes_differ() -> None:
    classes = ["interactive", "batch-1", "batch-2"]
    models = [f"m{number}" for number in range(len(palette.HUES))]
    colours = {palette.shade(models, classes, model, name) for model in models for name in classes}
    assert len(colours) == len(models) * len(classes)
    assert palette.hue(models, "unknown") == palette.FAINT
