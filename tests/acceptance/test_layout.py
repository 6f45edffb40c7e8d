"""The layout and the habits that a reader relies on: what a service consists of, how long a module may be, how it may be called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("gateway", "planner", "estimator", "agent")
LINES_MAX = 400
NAMELESS = re.compile(r"(^|_)(utils?|commons?|helpers?|managers?|misc)(_|$)")
MODULES = [
    path
    for folder in ("src", "services", "load", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name
]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_a_machine_a_shell_settings_and_an_image(service: str) -> None:
    package = ROOT / "services" / service / f"qlm_{service}"
    assert {"shell", "config", "__main__", "py.typed"} <= {path.name.removesuffix(".py") for path in package.iterdir()}
    assert any(path.name.removesuffix(".py") == "machine" for path in package.rglob("*"))
    assert (package.parent / "Dockerfile").is_file()


def test_modules_are_short_and_named_for_what_they_answer_for() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines > LINES_MAX} == {}
    assert [name for name in lengths if any(NAMELESS.search(part) for part in Path(name).with_suffix("").parts)] == []


def test_nothing_is_left_to_do_in_a_comment() -> None:
    words = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)))
    assert [str(path.relative_to(ROOT)) for path in MODULES if words.search(path.read_text())] == []
