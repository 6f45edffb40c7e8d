"""The file of keys: JSON, replaced in one step, readable by its owner alone."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from qlm_core.vocabulary.errors import ConfigError
from qlm_process.identity.keys import Key
from qlm_process.settings import Section

KEYS_MAX = 100_000
FILE_BYTES_MAX = 64 << 20
MODE = 0o600


class KeyFile(Section):
    """Content of the file."""

    keys: tuple[Key, ...] = Field((), max_length=KEYS_MAX)


def read_keys(path: str) -> tuple[Key, ...]:
    """Raises ConfigError, which quotes nothing of the file."""
    try:
        with open(path, "rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"security.key_file: {path} cannot be read: {error.strerror}; `qlm keys add` makes one") from None
    try:
        if len(text) > FILE_BYTES_MAX:
            raise ConfigError(f"security.key_file: {path} is larger than {FILE_BYTES_MAX:,} bytes")
        keys = KeyFile.model_validate_json(text).keys
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        known = {*KeyFile.model_fields, *Key.model_fields}
        where = ".".join(str(part) for part in problem["loc"] if isinstance(part, int) or part in known)
        raise ConfigError(f"security.key_file: {path}: {where or 'the file'}: {problem['msg']}") from None
    if len({key.id for key in keys}) < len(keys):
        raise ConfigError(f"security.key_file: {path}: two keys have one id")
    return keys


@contextmanager
def edited(path: str) -> Iterator[list[Key]]:
    """The keys of the file, none where there is no file, to be changed in place; written at the end, unless it raises. One writer at a
    time. Raises ConfigError."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = list(read_keys(path)) if os.path.exists(path) else []
        yield keys
        _write(Path(path), keys)
    finally:
        os.close(lock)


def _write(path: Path, keys: Sequence[Key]) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else MODE
    text = json.dumps({"keys": [key.model_dump(mode="json") for key in keys]}, indent=1) + "\n"
    handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else a revocation may not survive a power loss
    finally:
        os.close(folder)
