"""The table of `make campaign`: what is missing, failed or lost is missed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.campaign import CHATS, SERVICES, SHAPES, rows_of_kills, rows_of_streams, rows_of_tests

COUNTS = {"damaged memory": 2_000, "damaged server": 100, "damaged counters": 1, "chats": CHATS}
COUNTS |= {f"SIGTERM {service}": 100 for service in SERVICES}
KILLS = dict.fromkeys(("lost", "doubled", "wrong", "hung", "failed", "refused", "left"), 0)
KILLS |= {"requests": 20, "greedy_equal": 20, "kills": 9, "server_kills": 1}

STREAMS: dict[str, object] = {"stream_kills": 10, "streams_lost": 0, "context": {"failures": {}, "kills": {"streams_broken": 1}}}


def report(folder: Path, counts: dict[str, int], marks: int = 0, end: str = "") -> Path:
    """A JUnit file of one test a count; `end`: of the last one."""
    found = [*counts.items(), ("marks found", marks), *((f"shape{number}", 0) for number in range(SHAPES))]
    tests = [
        f'<testcase><properties><property name="{"shape" if name.startswith("shape") else name}" '
        f'value="{name if name.startswith("shape") else count}"/></properties></testcase>'
        for name, count in found
    ]
    tests[-1] = tests[-1].replace("</testcase>", f"{end}</testcase>")
    path = folder / "tests.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(tests)}</testsuite></testsuites>")
    return path


def test_all_is_met_where_all_was_run(tmp_path: Path) -> None:
    assert [row.what for row in rows_of_tests(report(tmp_path, COUNTS), lambda target: target) if not row.met] == []
    assert [row.what for row in rows_of_kills({**KILLS, "failures": []}, 20, 10, 1) if not row.met] == []


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_below_its_target_is_missed(tmp_path: Path, name: str) -> None:
    rows = rows_of_tests(report(tmp_path, {**COUNTS, name: COUNTS[name] - 1}), lambda target: target)
    assert len([row for row in rows if not row.met]) == 1


def test_a_mark_that_was_found_and_a_test_that_failed_or_was_skipped_are_missed(tmp_path: Path) -> None:
    assert len([row for row in rows_of_tests(report(tmp_path, COUNTS, marks=1), lambda target: target) if not row.met]) == 1
    for end in ("<failure/>", "<error/>", "<skipped/>"):
        rows = rows_of_tests(report(tmp_path, COUNTS, end=end), lambda target: target)
        assert {row.what for row in rows if not row.met} == {"tests of these that failed or were skipped", "template shapes"}


@pytest.mark.parametrize("name", KILLS)
def test_a_loss_or_too_few_kills_is_missed(name: str) -> None:
    worse = KILLS[name] + 1 if KILLS[name] == 0 else KILLS[name] - 1
    assert [row for row in rows_of_kills({**KILLS, name: worse, "failures": []}, 20, 10, 1) if not row.met]


@pytest.mark.parametrize(
    "worse",
    [
        {"stream_kills": 9},
        {"streams_lost": 1},
        {"context": {"failures": {"kills": "no cluster"}, "kills": {"streams_broken": 1}}},
        {"context": {"failures": {}, "kills": {"streams_broken": 0}}},
    ],
)
def test_a_lost_stream_or_kills_that_broke_none_are_missed(worse: dict[str, object]) -> None:
    assert [row for row in rows_of_streams(STREAMS, 10) if not row.met] == []
    assert len([row for row in rows_of_streams({**STREAMS, **worse}, 10) if not row.met]) == 1
