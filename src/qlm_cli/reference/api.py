"""docs/reference/api.md, written from the protos and the error classes: `python -m qlm_cli.reference.api protos`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from qlm.wire_errors import error_class

HEAD = """# API

<!-- Written by `make docs` from the protos and the error classes. -->

gRPC, package `qlm.api.v1`. `protos/qlm/api/v1` holds the messages, with rule and unit of every field; every service answers reflection and
`grpc.health.v1`. The SDK is `qlm.Client` and `qlm.AsyncClient` ([how to stream](../howto/stream-and-resume.md)).
"""
ERRORS = """## Errors

A refused call carries a canonical code and a `google.rpc.ErrorInfo` (domain `qlm`) with a reason and string details; where the same call
may succeed later, `google.rpc.RetryInfo` as well. The SDK raises a class of `qlm.errors`, all of them `QlmError`, with `reason`,
`details` and `retry_after_s`. A request that ends FAILED, CANCELLED or EXPIRED has its reason in its `Result`.

| reason | class | code, details and meaning |
|---|---|---|"""
COMMENTED = r"((?:^ *//.*\n)+) *"
CALL = re.compile(COMMENTED + r"rpc (\w+)\((\w+)\) returns \((?:stream )?(\w+)\)", re.MULTILINE)
REASON = re.compile(COMMENTED + r"ERROR_REASON_(\w+) = \d+;", re.MULTILINE)


def reference(protos: Path) -> str:
    """The whole page. `protos` is the folder of `qlm/api/v1`."""
    folder = protos / "qlm/api/v1"
    parts = [HEAD]
    for service in ("gateway", "planner", "estimator", "agent"):
        calls = [f"| `{name}` | `{sent}` | `{answer}` | {text} |" for text, name, sent, answer in _found(CALL, folder / f"{service}.proto")]
        parts.append("\n".join((f"## {service.title()}", "", "| call | request | answer | meaning |", "|---|---|---|---|", *calls, "")))
    reasons = (f"| `{name}` | `{error_class(name).__name__}` | {text} |" for text, name in _found(REASON, folder / "errors.proto"))
    return "\n".join((*parts, ERRORS, *reasons, ""))


def _found(pattern: re.Pattern[str], file: Path) -> Iterator[tuple[str, ...]]:
    """Yields the matches of a pattern, each with its comment as one line."""
    for comment, *rest in pattern.findall(file.read_text()):
        yield " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines()).replace("|", "\\|"), *rest


if __name__ == "__main__":
    sys.stdout.write(reference(Path(sys.argv[1])))
