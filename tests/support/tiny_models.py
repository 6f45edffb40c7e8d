"""Tiny random models for tests of real engines: made when first requested, once per process, and removed at its end."""

from __future__ import annotations

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from qlm_cli.models.random_llama import CONTEXT_TOKENS, make_random_model


def tiny_model(seed: int = 1, context_tokens: int = CONTEXT_TOKENS) -> Path:
    """The folder of the random Llama of that seed. Needs PyTorch and Transformers."""
    return _made(seed, context_tokens)


@cache
def _made(seed: int, context_tokens: int) -> Path:
    folder = _folder() / f"random-{seed}-{context_tokens}"
    make_random_model(folder, seed=seed, context_tokens=context_tokens)
    return folder


@cache
def _folder() -> Path:
    folder = Path(mkdtemp(prefix="qlm-tiny-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
