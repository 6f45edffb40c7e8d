"""The public messages are documented, and the one table of error reasons is what the code uses."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from qlm.api.v1.errors_pb2 import ErrorReason
from qlm.errors import QlmError
from qlm.wire_errors import error_class, status_code

ROOT = Path(__file__).parents[2]
PREFIX = "ERROR_REASON_"
TIMEOUT_S = 60
REASON = re.compile(r"\"([A-Z]+(?:_[A-Z]+)*)\"")
SOURCES = [path for folder in ("src", "services") for path in sorted((ROOT / folder).rglob("*.py")) if "_pb2" not in path.name]
TABLES = (ROOT / "src/qlm/wire_errors.py",)
"""Where reasons are listed rather than given."""
NAMED = {name.removeprefix(PREFIX) for name in ErrorReason.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
OF_A_RESULT = "In a Result"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    out = tmp_path_factory.mktemp("protos") / "set"
    protos = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", "--include_source_info", f"--descriptor_set_out={out}", *protos]
    subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_S)
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def _message_paths(message: DescriptorProto, path: tuple[int, ...], name: str) -> Iterator[tuple[tuple[int, ...], str]]:
    for index, field in enumerate(message.field):
        yield (*path, 2, index), f"{name}.{field.name}"
    for index, nested in enumerate(message.nested_type):
        yield from _message_paths(nested, (*path, 3, index), f"{name}.{nested.name}")


def _paths(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """Every RPC, field and enum value (but "unspecified"), by its path in the file's source info."""
    for index, service in enumerate(file.service):
        for number, method in enumerate(service.method):
            yield (6, index, 2, number), f"{service.name}.{method.name}"
    for index, message in enumerate(file.message_type):
        yield from _message_paths(message, (4, index), message.name)
    for index, enum in enumerate(file.enum_type):
        for number, value in enumerate(enum.value):
            if value.number:
                yield (5, index, 2, number), f"{enum.name}.{value.name}"


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    return {tuple(each.path): each.leading_comments.strip() for each in file.source_code_info.location}


def test_every_public_rpc_field_and_value_has_a_comment(files: list[FileDescriptorProto]) -> None:
    public = [file for file in files if file.name.startswith("qlm/api/")]
    assert len(public) == 8
    bare = [name for file in public for path, name in _paths(file) if not _comments(file).get(path)]
    assert bare == []


def test_every_reason_is_given_somewhere_and_every_reason_given_is_in_the_table() -> None:
    """A reason is a literal of the code: what is passed as `reason=` or stands as a class's default."""
    used: set[str] = set()
    given: set[str] = set()
    for path in SOURCES:
        text = path.read_text()
        if path not in TABLES:
            used |= NAMED & set(REASON.findall(text))
        given |= set(re.findall(r"(?:reason|problem|default_reason: ClassVar\[str\]|default_reason) ?= ?\"([A-Z_]+)\"", text))
    assert NAMED - used == set(), "reasons that no code gives"
    assert given - NAMED == set(), "reasons that the table does not have"


def test_the_table_names_the_code_that_a_reason_comes_with(files: list[FileDescriptorProto]) -> None:
    (file,) = [file for file in files if file.name.endswith("errors.proto")]
    comments = {name.rpartition(".")[2].removeprefix(PREFIX): _comments(file)[path] for path, name in _paths(file)}
    assert set(comments) == NAMED
    for reason, comment in comments.items():
        kind = error_class(reason)
        assert kind is not QlmError, reason
        if not comment.startswith(OF_A_RESULT):
            assert comment.startswith(status_code(kind("", reason=reason)).name), reason
