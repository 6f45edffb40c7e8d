"""Synthetic chats by seed, as bytes of HTTP calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks.queue.prompts import MODEL, PROMPTS
from benchmarks.queue.worker import Settings
from qlm_core.vocabulary.simulated_model import BYTES_PER_TEXT_TOKEN


@dataclass(slots=True, kw_only=True)
class ChatCalls:
    """Calls `<run_id>-<index>`, the same in every process for the same seed. `slo_s`: to the last token; `fields`: more of the body."""

    address: str
    seed: int
    run_id: str
    prompt_tokens: int
    output_tokens: int
    slo_s: float
    fields: Mapping[str, object] = field(default_factory=dict)
    headers: str = ""
    _bodies: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        generator = np.random.Generator(np.random.PCG64([self.seed, 0x636861]))
        half = BYTES_PER_TEXT_TOKEN * self.prompt_tokens // 2
        self._bodies = [self._body(generator.bytes(half).hex()) for _ in range(PROMPTS)]

    def _body(self, text: str) -> bytes:
        messages = [{"role": "user", "content": text}]
        document = {"model": MODEL, "messages": messages, "max_tokens": self.output_tokens, "ignore_eos": True, **self.fields}
        return json.dumps(document).encode()

    def request_id(self, index: int) -> str:
        return f"{self.run_id}-{index}"

    def call(self, index: int, headers: str = "") -> bytes:
        """`headers`: more of them, each with its line's end."""
        body = self._bodies[index % len(self._bodies)]
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nIdempotency-Key: {self.request_id(index)}\r\nx-qlm-slo-seconds: {self.slo_s:g}\r\n"
            f"{self.headers}{headers}\r\n"
        )
        return head.encode() + body


def chats_of(settings: Settings, *, headers: str = "", **fields: object) -> ChatCalls:
    names = ("address", "seed", "run_id", "prompt_tokens", "output_tokens", "slo_s")
    return ChatCalls(**{name: settings[name] for name in names}, headers=headers, fields=fields)
