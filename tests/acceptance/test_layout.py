"""The layout and the habits that a reader relies on: what a service consists of, how long a module may be, how it may be called."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from qlm_cli.reference import api, commands, metrics, openapi, settings

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


@pytest.mark.xdist_group("layout")
def test_tests_of_a_group_run_in_one_worker(request: pytest.FixtureRequest) -> None:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("without pytest-xdist's --dist loadgroup")
    assert request.node.nodeid.endswith("@layout")


def test_nothing_is_left_to_do_in_a_comment() -> None:
    words = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)))
    assert [str(path.relative_to(ROOT)) for path in MODULES if words.search(path.read_text())] == []


# Documents say what the code does -------------------------------------------------------------------------------------


DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "load/README.md", *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
WORDS_MAX = 22_000
"""Words in docs/ without the pages generated from the code."""
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
        ("openapi", openapi.reference),
    ],
)
def test_the_reference_is_in_step_with_the_code(page: str, reference: Callable[[], str]) -> None:
    name = f"{page}.json" if page == "openapi" else f"{page}.md"
    assert (ROOT / "docs/reference" / name).read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


def test_each_claim_of_the_trust_model_has_a_test_that_exists() -> None:
    claims = [line.split(" | ") for line in (ROOT / "docs/reference/trust.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(claims) >= 19
    for claim, *tests in claims:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", " ".join(tests))
        assert named, claim
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


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


def test_the_changelog_has_a_section_for_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## Unreleased$.*^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M | re.S)


# The committed stubs are those that the protos give -------------------------------------------------------------------


GENERATE_TIMEOUT_S = 100


def stubs_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*_pb2*.py*")) if path.suffix in (".py", ".pyi")
    }


def test_the_stubs_are_not_stale(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "protos").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *outputs, *protos],
        cwd=ROOT,
        env={**os.environ, "PATH": tools},
        check=True,
        timeout=GENERATE_TIMEOUT_S,
    )
    committed = {name.removeprefix("qlm/"): body for name, body in stubs_in(ROOT / "src").items()}
    made = {name.removeprefix("qlm/"): body for name, body in stubs_in(tmp_path).items()}
    assert sorted(made) == sorted(committed), "run `make protos`"
    assert [name for name in made if made[name] != committed[name]] == [], "run `make protos`"
