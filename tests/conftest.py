from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, which a command that sets up its logs changes: the next test finds it as it was."""
    root = logging.getLogger()
    handlers, level, configured = root.handlers, root.level, structlog.is_configured()
    yield root
    root.handlers, root.level = handlers, level
    if structlog.is_configured() and not configured:
        structlog.reset_defaults()
