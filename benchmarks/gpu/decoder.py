"""A decoder of a real model's shape in plain PyTorch, with weights of noise: the cost of a step over a batch depends on shapes alone.

Llama's block: RMS norms, grouped-query attention over a KV cache, and a gated feed-forward layer; one matrix for all of Q, K and V, as in
serving engines. Positions are not encoded and tokens not embedded: both costs are negligible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

EPSILON = 1e-5
BYTES_OF = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a model, by its published configuration."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        attention = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_size + self.heads * self.head_size * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * self.vocabulary * self.hidden

    def kv_bytes_per_token(self, dtype: str) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES_OF[dtype]


SHAPES = {
    "Mistral-7B": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_size=128, intermediate=14336, vocabulary=32_000),
    "Llama-3.2-1B": Shape(layers=16, hidden=2048, heads=32, kv_heads=8, head_size=64, intermediate=8192, vocabulary=128_256),
    "tiny": Shape(layers=2, hidden=128, heads=4, kv_heads=2, head_size=32, intermediate=256, vocabulary=512),
}
"""By the names of the hardware profiles; `tiny` shows on any machine that all parts run."""


class Decoder:
    """Weights on `device`; KV belongs to the caller."""

    def __init__(self, shape: Shape, device: str, dtype: str) -> None:
        self.shape = shape
        self.device = device
        self.dtype = getattr(torch, dtype)
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_size
        self._layers = [
            {
                "qkv": self._noise(qkv, shape.hidden),
                "out": self._noise(shape.hidden, shape.heads * shape.head_size),
                "gate_up": self._noise(2 * shape.intermediate, shape.hidden),
                "down": self._noise(shape.hidden, shape.intermediate),
                "norm_1": torch.ones(shape.hidden, device=device, dtype=self.dtype),
                "norm_2": torch.ones(shape.hidden, device=device, dtype=self.dtype),
            }
            for _ in range(shape.layers)
        ]
        self._head = self._noise(shape.vocabulary, shape.hidden)

    @property
    def weight_bytes(self) -> int:
        tensors = [self._head, *(tensor for layer in self._layers for tensor in layer.values())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def kv(self, sequences: int, tokens: int) -> torch.Tensor:
        """A cache full of noise: layer, key or value, sequence, head, token, place."""
        shape = self.shape
        size = (shape.layers, 2, sequences, shape.kv_heads, tokens, shape.head_size)
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def inputs(self, sequences: int, tokens: int) -> torch.Tensor:
        return torch.randn((sequences, tokens, self.shape.hidden), device=self.device, dtype=self.dtype)

    def decode(self, inputs: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """One token of each sequence over the cache, whose last position it writes. Returns the next tokens."""
        shape, sequences = self.shape, inputs.shape[0]

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            kv[layer, 0, :, :, -1:] = key.transpose(1, 2)
            kv[layer, 1, :, :, -1:] = value.transpose(1, 2)
            # The heads of a group as so many queries: each key is read once.
            grouped = query.view(sequences, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_size)
            return functional.scaled_dot_product_attention(grouped, kv[layer, 0], kv[layer, 1]).reshape(sequences, 1, -1)

        return self._forward(inputs, attend)

    def prefill(self, inputs: torch.Tensor) -> torch.Tensor:
        """All tokens of prompts, with causal attention. Returns the first tokens of the answers."""
        group = self.shape.heads // self.shape.kv_heads

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = (each.transpose(1, 2).repeat_interleave(group, dim=1) for each in (key, value))
            found = functional.scaled_dot_product_attention(query.transpose(1, 2), keys, values, is_causal=True)
            return found.transpose(1, 2).flatten(2)

        return self._forward(inputs, attend)

    def _forward(self, inputs: torch.Tensor, attend: Callable[[int, Any, Any, Any], torch.Tensor]) -> torch.Tensor:
        shape = self.shape
        x = inputs
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        for number, layer in enumerate(self._layers):
            qkv = functional.linear(functional.rms_norm(x, (shape.hidden,), layer["norm_1"], EPSILON), layer["qkv"])
            query, key, value = qkv.view(*x.shape[:2], -1, shape.head_size).split(sizes, dim=2)
            x = x + functional.linear(attend(number, query, key, value), layer["out"])
            gate, up = functional.linear(functional.rms_norm(x, (shape.hidden,), layer["norm_2"], EPSILON), layer["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        return functional.linear(x[:, -1], self._head).argmax(-1)

    def _noise(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), device=self.device, dtype=self.dtype).mul_(columns**-0.5)
