"""A model's folder in the Hugging Face layout, read without vLLM: its needs, and the shape that it shares with others."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlm_agent.engines.port import ModelLoadFailed
from qlm_core.vocabulary.model import ModelFacts

NAMES = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype"})
"""Keys of config.json without a bearing on the shape."""

INDEX = "model.safetensors.index.json"

VALUE_BYTES = {"float32": 4, "auto": 2, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """`files`: of the weights, as its index names them if it has one (folders often hold the same weights in a second layout). `shape`:
    equal for models whose weights can replace each other, tokenizer and special tokens included."""

    path: Path
    files: tuple[Path, ...]
    weights_bytes: int
    shape: str
    config: Mapping[str, Any]

    @classmethod
    def read(cls, model: str, weights: str) -> ModelFolder:
        """Raises ModelLoadFailed with the missing files."""
        path = Path(weights)
        if not weights:
            raise ModelLoadFailed(f"model {model}: models.weights is empty: it names the folder of its weights")
        try:
            files = _weight_files(model, path)
            missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
            missing += [file.name for file in files if not file.is_file()] if files else ["*.safetensors"]
            if missing:
                raise ModelLoadFailed(f"model {model}: models.weights: {weights} has no {', '.join(missing)}")
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise TypeError("config.json is no JSON object")
            shape = hashlib.blake2b(json.dumps({key: config[key] for key in sorted(config) if key not in NAMES}).encode())
            for name in ("tokenizer.json", "generation_config.json"):
                shape.update((path / name).read_bytes() if (path / name).is_file() else b"-")
            size = sum(file.stat().st_size for file in files)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ModelLoadFailed(f"model {model}: {weights} cannot be read: {error}") from error
        return cls(path=path.absolute(), files=files, weights_bytes=size, shape=shape.hexdigest(), config=config)

    @property
    def facts(self) -> ModelFacts | None:
        """Its shape for predictions, None if config.json lacks the usual keys. Parameters count as two bytes of a file, as decisions
        assume."""
        try:
            heads = int(self.config["num_attention_heads"])
            hidden = int(self.config["hidden_size"])
            return ModelFacts(
                parameters_billion=self.weights_bytes / 2e9,
                layers=int(self.config["num_hidden_layers"]),
                hidden_size=hidden,
                kv_heads=int(self.config.get("num_key_value_heads") or heads),
                head_size=int(self.config.get("head_dim") or hidden // heads),
            )
        except (KeyError, TypeError, ValueError, ArithmeticError):  # the last: no heads
            return None

    def kv_bytes_per_token(self, dtype: str, n_gpu: int = 1) -> int:
        """Keys and values of all layers, on each of so many GPUs that share the model. Raises ModelLoadFailed if config.json lacks them."""
        facts = self.facts
        if facts is None:
            raise ModelLoadFailed(f"{self.path / 'config.json'} does not say layers, heads and hidden size")
        return 2 * VALUE_BYTES[dtype] * facts.layers * max(1, facts.kv_heads // n_gpu) * facts.head_size


def _weight_files(model: str, path: Path) -> tuple[Path, ...]:
    index = path / INDEX
    if not index.is_file():
        return tuple(sorted(path.glob("*.safetensors")))
    try:
        return tuple(path / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadFailed(f"model {model}: {index} cannot be read: {error!r}") from error


CHUNK_BYTES = 8 << 20


async def read_ahead(files: Sequence[Path]) -> int:
    """Returns the bytes read; ends soon after it is cancelled. Raises OSError."""
    stop = threading.Event()
    reading = asyncio.ensure_future(asyncio.to_thread(_read, files, stop))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([reading])
        raise


def _read(files: Sequence[Path], stop: threading.Event) -> int:
    total = 0
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while not stop.is_set() and (count := file.readinto(buffer)):
                total += count
    return total
