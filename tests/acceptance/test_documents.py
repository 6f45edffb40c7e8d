"""Documents say what the code does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from qlm_cli.reference import api, commands, metrics, settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "load/README.md", *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
WORDS_MAX = 22_000
"""Of docs/ without what is generated from the code."""
README_LINES_MAX = 120
CHANGELOG_LINES_MAX = 120
DECISIONS_MAX = 24
STATUS = re.compile(r"^Status: (accepted|superseded)", re.MULTILINE)
DECISION = re.compile(r"\bADR (\d+)|docs/adr/(\d{4})")


@pytest.mark.parametrize(
    ("page", "reference"),
    [
        ("configuration", settings.reference),
        ("metrics", metrics.reference),
        ("cli", commands.reference),
        ("api", lambda: api.reference(ROOT / "protos")),
    ],
)
def test_the_reference_is_in_step_with_the_code(page: str, reference: Callable[[], str]) -> None:
    assert (ROOT / f"docs/reference/{page}.md").read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


def test_documents_are_short() -> None:
    pages = [path for path in ROOT.glob("docs/**/*.md") if "reference" not in path.parts]
    assert sum(len(path.read_text().split()) for path in pages) <= WORDS_MAX
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= CHANGELOG_LINES_MAX


def test_every_decision_has_a_status_and_a_row_in_the_index() -> None:
    decisions = sorted(ROOT.glob("docs/adr/[0-9]*.md"))
    index = (ROOT / "docs/adr/README.md").read_text()
    assert len(decisions) <= DECISIONS_MAX
    assert [path.name for path in decisions if not STATUS.search(path.read_text()) or f"({path.name})" not in index] == []


def test_a_decision_that_the_code_names_exists() -> None:
    known = {int(path.name[:4]) for path in ROOT.glob("docs/adr/[0-9]*.md")}
    files = [path for folder in ("src", "services", "load", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = {
        (path.name, int(first or second))
        for path in [*files, ROOT / "pyproject.toml"]
        for first, second in DECISION.findall(path.read_text())
    }
    assert {(name, number) for name, number in named if number not in known} == set()


def test_the_changelog_names_the_unreleased_changes() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
