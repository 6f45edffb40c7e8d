"""Coverage-guided fuzzing of what the gateway reads: `python tests/fuzz.py TARGET --runs 200000`. Needs `pip install atheris`, which is
for Linux and some versions of Python alone, so it is no dependency.

Anything but a QlmError ends the process with a report and the input. TARGETs: chat, completion, response (a body with its headers),
batch (a file), proto (a serialized Request).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import atheris
from google.protobuf.message import DecodeError

with atheris.instrument_imports(include=["qlm_gateway", "qlm_core"]):
    from qlm.api.v1.request_pb2 import Request
    from qlm_core.vocabulary.errors import QlmError
    from qlm_core.vocabulary.model import ModelSpec
    from qlm_core.vocabulary.request import Slo, SloKind
    from qlm_gateway.admission.catalogue import ModelEntry
    from qlm_gateway.admission.rules import AdmissionLimits, admit, check
    from qlm_gateway.batches.lines import check_file
    from qlm_gateway.front.http.bodies import Body, ChatBody, CompletionBody, read_body
    from qlm_gateway.front.http.calls import read_call
    from qlm_gateway.front.http.responses_api.body import ResponsesBody
    from qlm_gateway.front.http.settings import HttpSettings
    from qlm_gateway.wire import draft_of

SETTINGS = HttpSettings()
CATALOGUE = {"m": ModelEntry(spec=ModelSpec(name="m", profile="Mistral-7B", context_tokens_max=512))}
LIMITS = AdmissionLimits(default_slo=Slo(kind=SloKind.COMPLETION, seconds=20.0))
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 5,
    "stop": ["a"],
    "n": 2,
    "response_format": {"type": "text"},
}
TEXT = {"model": "m", "prompt": ["x", "y"], "max_tokens": 5, "logprobs": 2, "stream": True, "stream_options": {"include_usage": True}}
RESPONSE = {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "max_output_tokens": 5}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
HEADERS = b"x-qlm-slo-seconds: 5\nx-llm-d-inference-ttl: 1m.5s\nLast-Event-ID: r/1/1,1\n\n"


def admit_request(request: Request) -> None:
    draft = draft_of(request)
    admit(draft, check(draft, CATALOGUE, LIMITS), 5, LIMITS, lambda: "id")


def body_of(cls: type[Body]) -> Callable[[bytes], None]:
    """Reads lines of headers, an empty one and a body, and admits what they ask for."""

    def read(data: bytes) -> None:
        lines, _, content = data.partition(b"\n\n")
        headers = dict(line.split(": ", 1) for line in lines.decode("latin-1").split("\n") if ": " in line)
        body = read_body(cls, content, refuse_unknown=False)
        chat = body.chat() if isinstance(body, ResponsesBody) else body
        for request in read_call(chat, headers, SETTINGS, "id").requests:
            admit_request(request)

    return read


def read_batch(data: bytes) -> None:
    total, errors = check_file(BytesIO(data), "/v1/chat/completions", SETTINGS, 100, ["m"])
    assert total >= 0
    assert len(errors) <= 100


def read_proto(data: bytes) -> None:
    try:
        request = Request.FromString(data)
    except DecodeError:
        return
    admit_request(request)


TARGETS: Mapping[str, tuple[Callable[[bytes], None], bytes]] = {
    "chat": (body_of(ChatBody), HEADERS + json.dumps(CHAT).encode()),
    "completion": (body_of(CompletionBody), HEADERS + json.dumps(TEXT).encode()),
    "response": (body_of(ResponsesBody), HEADERS + json.dumps(RESPONSE).encode()),
    "batch": (read_batch, b"\xef\xbb\xbf" + json.dumps(LINE).encode() + b"\r\n" + json.dumps(LINE).encode()),
    "proto": (read_proto, Request(model="m", text="x", tenant="t", request_id="r").SerializeToString()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    read, example = TARGETS[options.target]

    def one(data: bytes) -> None:
        with suppress(QlmError):  # a refusal
            read(data)

    corpus = Path(tempfile.mkdtemp(prefix="qlm-fuzz-"))
    (corpus / "example").write_bytes(example)
    atheris.Setup(
        [sys.argv[0], f"-runs={options.runs}", f"-seed={options.seed}", "-max_len=2048", f"-artifact_prefix={corpus}/", str(corpus)], one
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
