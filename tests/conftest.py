from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

settings.register_profile("busy", deadline=None)  # an example may take long where others use the cores
settings.load_profile("busy")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the name of a test's `xdist_group` at the end of its id, where pytest-xdist looks for it. The way in which pytest-xdist 3.8 does
    that has no effect since pytest 9.2: each worker would start what the tests of a group share."""
    for item in items if getattr(config.option, "loadgroup", False) else ():
        group = item.get_closest_marker("xdist_group")
        if group is not None and "@" not in item.nodeid.rpartition("]")[2]:
            item._id = item.id.parse(f"{item.nodeid}@{group.args[0]}")


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, which a command that sets up its logs changes: the next test finds it as it was."""
    root = logging.getLogger()
    handlers, level, configured = root.handlers, root.level, structlog.is_configured()
    yield root
    root.handlers, root.level = handlers, level
    if structlog.is_configured() and not configured:
        structlog.reset_defaults()
