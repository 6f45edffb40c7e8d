"""One engine of each kind, its first model active.

The kinds are those that need nothing but this package, or those that the environment variable QLM_TEST_ENGINES names, separated by commas:
`make test-vllm` runs the suite on engines that need vLLM. The kind "x" is what `SUBJECTS` in `x_subject.py` here says.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib import import_module

import pytest

from qlm_agent.engines.port import Tier

from .subjects import SUBJECTS, Kind, Limits, Reader, Subject

Start = Callable[[Limits], Awaitable[Subject]]


def _kinds() -> Mapping[str, Kind]:
    named = [name for name in os.environ.get("QLM_TEST_ENGINES", "").split(",") if name]
    found: dict[str, Kind] = {} if named else dict(SUBJECTS)
    for name in named or ["openai_text"]:
        found.update(import_module(f".{name}_subject", __package__).SUBJECTS)
    return found


KINDS = _kinds()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*can): what an engine must be able to do")


@pytest.fixture(params=sorted(KINDS))
def make_subject(request: pytest.FixtureRequest) -> Callable[[Limits], Subject]:
    """Makes an engine that was not started."""
    kind = KINDS[request.param]
    for mark in request.node.iter_markers("needs"):
        missing = [can.value for can in mark.args if can not in kind.can]
        if missing:
            pytest.skip(f"{request.param} cannot {', '.join(missing)}")
    return kind.make


@pytest.fixture
async def start(make_subject: Callable[[Limits], Subject]) -> AsyncIterator[Start]:
    """Starts engines of some limits; each has its first model active."""
    started: list[Subject] = []

    async def start(limits: Limits) -> Subject:
        subject = make_subject(limits)
        started.append(subject)
        await subject.engine.start()
        await subject.engine.load_model(subject.models[0], Tier.ACTIVE)
        return subject

    yield start
    for subject in started:
        await subject.engine.stop()


@pytest.fixture
async def subject(start: Start) -> Subject:
    return await start(Limits())


@pytest.fixture
def reader(subject: Subject) -> Reader:
    return Reader(subject)
