"""What the tests sample, whole: `python tests/campaign.py --out FOLDER`. Runs damaged records, signals, chats and marked secrets with
pytest, then kills under load and under streams of the OpenAI client, and prints one table. `--share`: of each size, for a trial; targets
shrink with it. `--workers`: of pytest.

Exit codes: 0 all targets are met; 1 one is missed, or a part did not end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TESTS = (
    "tests/conformance/test_damaged_records.py",
    "tests/acceptance/test_sigterm.py",
    "tests/acceptance/test_secrets.py",
    "tests/unit/test_prompt_encoding_oracle.py",
)
SIZES = {"QLM_DAMAGE_SEEDS": 2_000, "QLM_DAMAGE_SERVER_SEEDS": 100, "QLM_SIGTERM_RUNS": 100, "QLM_TEST_CHATS": 100}
REQUESTS, KILLS, SERVER_KILLS = 20_000, 200, 20
STREAM_KILLS_QUICK = 8
SHAPES, CHATS = 25, 5_000
PART_TIMEOUT_S = 3 * 3600.0
SERVICES = ("gateway", "planner", "estimator", "agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure against its target."""

    what: str
    value: str
    target: str
    met: bool


def at_least(what: str, value: int, target: int) -> Row:
    return Row(what=what, value=f"{value:,}", target=f">= {target:,}", met=value >= target)


def none_of(what: str, value: int) -> Row:
    return Row(what=what, value=f"{value:,}", target="0", met=value == 0)


def run_tests(out: Path, share: float, workers: int) -> list[Row]:
    report = out / "tests.xml"
    report.unlink(missing_ok=True)
    sizes = {name: str(math.ceil(size * share)) for name, size in SIZES.items()}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), f"--junitxml={report}", *TESTS]
    ended = subprocess.run(command, env={**os.environ, **sizes}, timeout=PART_TIMEOUT_S, check=False)
    return [*rows_of_tests(report, lambda target: math.ceil(target * share)), none_of("exit code of pytest", ended.returncode)]


def rows_of_tests(report: Path, sized: Callable[[int], int]) -> list[Row]:
    """Figures of a JUnit report: the properties of its tests that passed. Raises OSError or ParseError where there is none."""
    counted, shapes, failed, marks = Counter[str](), set[str](), 0, None
    for test in ElementTree.parse(report).iter("testcase"):
        found = [(each.get("name", ""), each.get("value", "")) for each in test.iter("property")]
        marks = next((int(value) for name, value in found if name == "marks found"), marks)
        if any(test.find(end) is not None for end in ("failure", "error", "skipped")):
            failed += 1
            continue
        shapes |= {value for name, value in found if name == "shape"}
        for name, value in found:
            if name not in ("shape", "marks found"):
                counted[name] += int(value)
    return [
        at_least("damaged-record seeds on the memory twin", counted["damaged memory"], sized(2_000)),
        at_least("damaged-record seeds on a server", counted["damaged server"], sized(100)),
        at_least("damaged counters of bytes or of kept results among them", counted["damaged counters"], 1),
        *(at_least(f"SIGTERM 0 to 200 ms after the start: {name}", counted[f"SIGTERM {name}"], sized(100)) for name in SERVICES),
        at_least("template shapes", len(shapes), SHAPES),
        at_least("random chats equal to transformers", counted["chats"], sized(CHATS)),
        Row(what="marked secrets and prompts found", value="not searched" if marks is None else str(marks), target="0", met=marks == 0),
        none_of("tests of these that failed or were skipped", failed),
    ]


def run_kills(out: Path, share: float) -> list[Row]:
    requests, kills, server_kills = (math.ceil(size * share) for size in (REQUESTS, KILLS - SERVER_KILLS, SERVER_KILLS))
    load = ("--requests", requests, "--rate", 3.75, "--time-scale", 8, "--kills", kills, "--server-kills", server_kills)
    command = [sys.executable, "-m", "qlm_load", "campaign", "--out", str(out), *(str(option) for option in load)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PART_TIMEOUT_S, check=False)
    Console().print(ended.stdout, markup=False, highlight=False)
    return rows_of_kills(json.loads((ended.stdout.splitlines() or [""])[-1]), requests, kills + server_kills, server_kills)


def rows_of_kills(found: Mapping[str, Any], requests: int, kills: int, server_kills: int) -> list[Row]:
    """Figures of a campaign's last line."""
    equal = found["greedy_equal"] / found["requests"]
    return [
        at_least("kills of any process under load", found["kills"] + found["server_kills"], kills),
        at_least("kills of the server among them", found["server_kills"], server_kills),
        at_least("requests", found["requests"], requests),
        *(none_of(name, found[name]) for name in ("lost", "doubled", "wrong", "hung", "failed", "refused", "left")),
        Row(what="greedy output equal", value=f"{equal:.4f}", target="1.0", met=equal == 1.0),
        none_of("other faults of the campaign", len(found["failures"])),
    ]


def run_streams(out: Path, share: float) -> list[Row]:
    """Runs the bench `gateway`, in its small size (STREAM_KILLS_QUICK) where `share` is below 1."""
    command = [sys.executable, "-m", "benchmarks", "gateway", "--only", "kills", "--json", "--out", str(out)]
    command += ["--quick"] if share < 1.0 else []
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PART_TIMEOUT_S, check=False)
    return rows_of_streams(json.loads((ended.stdout.splitlines() or [""])[-1]), STREAM_KILLS_QUICK if share < 1.0 else KILLS)


def rows_of_streams(found: Mapping[str, Any], kills: int) -> list[Row]:
    """Figures of the bench of streams under kills."""
    context = found["context"]
    return [
        at_least("kills of any process under 64 streaming openai clients", found["stream_kills"], kills),
        at_least("streams that broke off and continued", context["kills"]["streams_broken"], 1),
        none_of("streams that did not arrive whole and token-exact", found["streams_lost"]),
        none_of("failures of the bench", len(context["failures"])),
    ]


def part(what: str, run: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a part; one missed row where it did not end or says nothing."""
    try:
        return run()
    except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError, ValueError, KeyError) as error:
        return [Row(what=what, value=f"{type(error).__name__}: {error}", target="a result", met=False)]


def print_rows(rows: Sequence[Row]) -> None:
    table = Table(title="campaign")
    for column in ("what", "value", "target", ""):
        table.add_column(column, justify="right" if column in ("value", "target") else "left")
    for row in rows:
        table.add_row(row.what, row.value, row.target, "met" if row.met else "MISSED")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/campaign"))
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = part("tests", lambda: run_tests(options.out, options.share, options.workers))
    rows += part("kills under load", lambda: run_kills(options.out, options.share))
    rows += part("kills under streams", lambda: run_streams(options.out, options.share))
    print_rows(rows)
    return int(not all(row.met for row in rows))


if __name__ == "__main__":
    sys.exit(main())
