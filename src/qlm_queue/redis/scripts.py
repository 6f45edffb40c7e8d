"""The server-side scripts as one function library of Redis 7.0+ or Valkey.

A library's name and its functions carry a digest of the source, so that processes of two releases can share a server during a restart.
"""

from __future__ import annotations

import hashlib
import re
from importlib import resources

_FILES = (
    "prelude.lua", "writes.lua", "leases.lua", "gateway.lua", "planner.lua", "regroup.lua", "plan.lua", "pauses.lua", "agent.lua",
    "operator.lua", "repair.lua", "replicas.lua",
)  # fmt: skip

LIBRARY_PREFIX = "qlm_"

# All but `accept` go on where the server is full: they end requests, and free memory with that.
WRITING = (
    "acquire_lease", "renew_lease", "release_lease", "register", "describe", "deregister", "publish_profiles", "publish_waits",
    "attach", "cancel", "erase", "expire", "pause", "resume",
    "arrived", "place", "regroup", "apply_plan", "reclaim", "shed", "forget_instance",
    "pull", "give_back", "emit", "complete",
    "repair_keys", "repair_requests", "repair_groups", "repair_members", "repair_kept", "repair_counts", "condemn",
    "mark",
)  # fmt: skip
READING = ("leader_address", "read_waits", "find", "held", "requests_ahead", "unplaced", "owned", "waiting", "overview", "live_requests")


def library_source() -> str:
    """The Lua source of all functions, without their registration."""
    folder = resources.files("qlm_queue") / "lua"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in _FILES)


class Library:
    """A function library made from Lua source."""

    def __init__(self, source: str) -> None:
        self.suffix = hashlib.sha256(source.encode()).hexdigest()[:12]
        self.name = f"{LIBRARY_PREFIX}{self.suffix}"
        registrations = [
            f"redis.register_function{{function_name='{self.function(name)}', callback={name}{flags}}}"
            for names, flags in ((("accept",), ""), (WRITING, ", flags={'allow-oom'}"), (READING, ", flags={'no-writes'}"))
            for name in names
        ]
        self.code = f"#!lua name={self.name}\n{source}\n" + "\n".join(registrations) + "\n"

    def function(self, name: str) -> str:
        """The server's name of a function."""
        return f"qlm_{name}_{self.suffix}"


_NOT_LOADED = re.compile(r"function not found", re.IGNORECASE)


def is_not_loaded(message: str) -> bool:
    """Whether a server's error says that the library is missing there."""
    return _NOT_LOADED.search(message) is not None
