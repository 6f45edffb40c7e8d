"""Calls to QLM's scheduler in a process of vLLM's own (AsyncLLM): utility calls of its EngineCore.

vLLM finds a utility call by its name on the EngineCore, between two steps. These are added there when vLLM imports the plug-in, in that
process; nothing of vLLM's own is replaced. Answers are plain lists and dicts, since they cross a socket.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm.v1.engine.core import EngineCore, EngineCoreProc


def qlm_offload(core: Any, run_ids: list[str]) -> list[str]:
    """See `KvSwapScheduling.offload`."""
    leaving: list[str] = core.scheduler.offload(run_ids)
    return leaving


def qlm_restore(core: Any, run_ids: list[str]) -> list[str]:
    """See `KvSwapScheduling.restore`."""
    back: list[str] = core.scheduler.restore(run_ids)
    return back


def qlm_swap_state(core: Any) -> dict[str, Any]:
    """`away`: output tokens of each run whose KV is in host memory; `used`, `capacity`: tokens of KV; `moving`: copies are due."""
    return dict(core.scheduler.swap_state())


CALLS = (qlm_offload, qlm_restore, qlm_swap_state)


def lacking() -> list[str]:
    """The parts that this vLLM lacks for them."""
    found = inspect.getsource(EngineCoreProc._handle_client_request)
    return (
        [] if "UTILITY" in found and "getattr(self, method_name)" in found else ["EngineCoreProc._handle_client_request of utility calls"]
    )


def install() -> None:
    """Safe twice."""
    for call in CALLS:
        setattr(EngineCore, call.__name__, call)
