"""Facts of a model's folder: read from config.json and the heads of the weight files, without loading weights."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qlm_cli.models.model_folder import CHAT_TEMPLATE_FILE, CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_SUFFIX
from qlm_core.vocabulary.errors import ConfigError

HEAD_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model on disk. `tokenizer` and `chat_template` are paths, empty where the folder has none."""

    name: str
    folder: Path
    architecture: str
    dtype: str
    parameters: int
    size_bytes: int
    context_tokens: int
    vocabulary_size: int
    layers: int
    hidden_size: int
    kv_heads: int
    head_size: int
    tokenizer: str
    chat_template: str

    def settings(self) -> dict[str, object]:
        """Its entry of `models` in the configuration file."""
        return {
            "name": self.name,
            "profile": self.name,
            "weights": str(self.folder),
            "tokenizer": self.tokenizer,
            "chat_template": self.chat_template,
            "context_tokens_max": self.context_tokens,
            "vocabulary_size": self.vocabulary_size,
            "facts": {
                "parameters_billion": round(self.parameters / 1e9, 6),
                "layers": self.layers,
                "hidden_size": self.hidden_size,
                "kv_heads": self.kv_heads,
                "head_size": self.head_size,
            },
        }

    def settings_text(self) -> str:
        """The same as YAML, an item of the list."""
        text: str = yaml.safe_dump([self.settings()], sort_keys=False, default_flow_style=None, width=200)
        return text


def find_models(folder: Path) -> list[FoundModel]:
    """The models in the folders of `folder`, by name; none where it is missing. Raises ConfigError for a damaged one."""
    if not folder.is_dir():
        return []
    found = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and (path / CONFIG_FILE).is_file()]
    return [read_model(path) for path in found]


def read_model(folder: Path) -> FoundModel:
    """The model in `folder`. Raises ConfigError where its files cannot be read as a model in the Hugging Face layout."""
    weights = sorted(folder.glob(f"*{WEIGHTS_SUFFIX}"))
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return FoundModel(
            name=folder.name,
            folder=folder,
            architecture=(config.get("architectures") or ["unknown"])[0],
            dtype=config.get("dtype") or config.get("torch_dtype") or "unknown",
            parameters=sum(math.prod(shape) for path in weights for shape in _shapes(path)),
            size_bytes=sum(path.stat().st_size for path in weights),
            context_tokens=config["max_position_embeddings"],
            vocabulary_size=config["vocab_size"],
            layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            tokenizer=_path(folder / TOKENIZER_FILE),
            chat_template=_path(folder / CHAT_TEMPLATE_FILE),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{folder}: not a model in the Hugging Face layout: {type(error).__name__}: {error}") from error


def _shapes(weights: Path) -> Iterator[list[int]]:
    """Yields the shapes of the tensors in a safetensors file: eight bytes hold the length of the JSON that names them."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > HEAD_BYTES_MAX:
            raise ValueError(f"{weights.name} has a head of {size} bytes")
        head: Mapping[str, Any] = json.loads(file.read(size))
    for name, tensor in head.items():
        if name != "__metadata__":
            yield tensor["shape"]


def _path(path: Path) -> str:
    return str(path) if path.is_file() else ""
