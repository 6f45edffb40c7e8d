"""QLM: a durable queue in front of LLM serving engines that keeps end-to-end latency objectives.

async with qlm.AsyncClient("127.0.0.1:50051") as client:
    async for chunk in client.generate("mistral-7b", "Why is the sky blue?", slo_s=20):
        print(chunk.text, end="")
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

# Before grpc starts: its handlers of forks are not for asyncio, start its threads again in a forked child, and crash there.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from qlm import errors
    from qlm.async_client import AsyncClient
    from qlm.client import Client, SyncTokenStream
    from qlm.credentials import Credentials
    from qlm.token_stream import TokenStream
    from qlm.values import (
        Accepted,
        ListedRequest,
        ModelInfo,
        Outlook,
        Pause,
        Prediction,
        QueueStatus,
        RequestPage,
        RequestState,
        RequestStatus,
        Result,
        Slo,
        TokenChunk,
        TokenLogprobs,
    )

__all__ = [
    "Accepted",
    "AsyncClient",
    "Client",
    "Credentials",
    "ListedRequest",
    "ModelInfo",
    "Outlook",
    "Pause",
    "Prediction",
    "QueueStatus",
    "RequestPage",
    "RequestState",
    "RequestStatus",
    "Result",
    "Slo",
    "SyncTokenStream",
    "TokenChunk",
    "TokenLogprobs",
    "TokenStream",
    "errors",
]

_HOMES = {
    "AsyncClient": "qlm.async_client",
    "Client": "qlm.client",
    "Credentials": "qlm.credentials",
    "SyncTokenStream": "qlm.client",
    "TokenStream": "qlm.token_stream",
    "errors": "qlm.errors",
}


def __getattr__(name: str) -> object:
    # Lazy: servers import `qlm.api` stubs and must not pay for the client.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_HOMES.get(name, "qlm.values"))
    return module if name == "errors" else getattr(module, name)
