"""One engine of each kind, its first model active."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from qlm_agent.engine import Tier

from .subjects import SUBJECTS, Limits, Reader, Subject

Start = Callable[[Limits], Awaitable[Subject]]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*can): what an engine must be able to do")


@pytest.fixture(params=sorted(SUBJECTS))
def make_subject(request: pytest.FixtureRequest) -> Callable[[Limits], Subject]:
    """Makes an engine that was not started."""
    kind = SUBJECTS[request.param]
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
