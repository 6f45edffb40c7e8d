"""Documents say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qlm_cli.reference import metrics as metrics_reference
from qlm_cli.reference import settings as settings_reference

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def test_the_configuration_page_is_in_step_with_the_settings() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == settings_reference.reference(), "run `make docs`"


def test_the_metrics_page_is_in_step_with_the_metrics() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == metrics_reference.reference(), "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


def test_the_changelog_names_the_unreleased_changes() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
