"""One engine of each kind, its first model active."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from qlm_agent.engine import Tier

from .subjects import SUBJECTS, Reader, Subject


@pytest.fixture(params=sorted(SUBJECTS))
def make_subject(request: pytest.FixtureRequest) -> Callable[..., Subject]:
    """Makes an engine that was not started; keywords set its limits."""
    made: Callable[..., Subject] = SUBJECTS[request.param]
    return made


@pytest.fixture
async def subject(make_subject: Callable[..., Subject]) -> AsyncIterator[Subject]:
    found = make_subject()
    await found.engine.start()
    await found.engine.load_model(found.models[0], Tier.ACTIVE)
    yield found
    await found.engine.stop()


@pytest.fixture
def reader(subject: Subject) -> Reader:
    return Reader(subject.engine)
