"""Which code an agent and its engine processes run: they speak to each other without versions, so it has to be the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

HERE = Path(__file__).parent
BESIDE = ("engine.py", "engine_policy.py", "logprobs.py", "stop_strings.py")
"""What engine processes use of the package around this one."""


def digest() -> str:
    """Of the code of this installation. Raises OSError."""
    found = hashlib.blake2b(digest_size=8)
    for path in (*sorted(HERE.glob("*.py")), *(HERE.parent / name for name in BESIDE)):
        found.update(path.read_bytes())
    return found.hexdigest()
