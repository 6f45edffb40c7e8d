"""docs/reference/openapi.json, written from the bodies of calls: `python -m qlm_cli.reference.openapi`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from qlm_gateway.front.http.batch_routes import LIST_MAX, NewBatch
from qlm_gateway.front.http.bodies import ChatBody, CompletionBody
from qlm_gateway.front.http.responses_api.body import ResponsesBody

Schema = dict[str, Any]
REFUSALS = {"400": "A field or header is wrong", "403": "The key may not", "404": "Not there"}
OVERLOADS = {"408": "The body took too long", "413": "Too large", "415": "Of another type", "429": "Full, late or beyond a rate"}
ENDS = {"409": "Another request of this id, or cancelled", "500": "The request failed", "504": "Expired, or beyond what the client reads"}
ALWAYS = {"401": "No valid key", "503": "Cannot serve now"}
NUMBER, TEXT = {"type": "number"}, {"type": "string"}
OBJECTS: Mapping[str, Sequence[str]] = {
    "Completion": ("id", "object", "created", "model", "choices", "usage"),
    "Response": ("id", "object", "created_at", "status", "model", "output"),
    "Model": ("id", "object", "created", "owned_by", "max_model_len"),
    "Request": ("id", "object", "state"),
    "Erased": ("id", "object", "state", "deleted"),
    "File": ("id", "object", "bytes", "created_at", "filename", "purpose"),
    "Deleted": ("id", "object", "deleted"),
    "Batch": ("id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at", "request_counts"),
    "List": ("object", "data"),
    "Status": ("status",),
}
"""Answers, and their fields that are always there."""
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT,
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": TEXT,
            },
        }
    },
}
OBJECTIVES: Mapping[str, Schema] = {
    "Idempotency-Key": {"type": "string", "pattern": "^[!-~]{1,128}$"},
    "x-qlm-mode": {"enum": ["wait", "enqueue"]},
    "x-qlm-slo-seconds": NUMBER,
    "x-qlm-slo-kind": {"enum": ["completion", "first_token"]},
    "x-qlm-priority": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "x-llm-d-slo-ttft-ms": NUMBER,
    "x-llm-d-slo-tpot-ms": NUMBER,
    "x-llm-d-inference-objective": TEXT,
    "x-llm-d-inference-ttl": {"type": "string", "pattern": r"^(([0-9]+(\.[0-9]*)?|\.[0-9]+)(h|ms|m|s|us|ns))+$"},
    "x-llm-d-inference-fairness-id": TEXT,
    "x-stainless-read-timeout": TEXT,
    "x-qlm-keep-alive": {"enum": ["comment", "position"]},
}
PAGES: Mapping[str, Schema] = {"limit": {"type": "integer", "minimum": 1, "maximum": LIST_MAX}, "after": TEXT}


def document() -> Schema:
    """The routes for clients; those for operators are theirs alone and may change."""
    chat = _call("A chat's completion", "Completion", body=ChatBody, headers=OBJECTIVES, refusals={**OVERLOADS, **ENDS}, enqueues=True)
    text = _call("A completion", "Completion", body=CompletionBody, headers=OBJECTIVES, refusals={**OVERLOADS, **ENDS}, enqueues=True)
    response = _call("A response", "Response", body=ResponsesBody, headers=OBJECTIVES, refusals={**OVERLOADS, **ENDS})
    upload = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {"file": {**TEXT, "format": "binary"}, "purpose": {"const": "batch"}},
    }
    paths = {
        "/v1/chat/completions": {"post": _streamed(chat)},
        "/v1/completions": {"post": _streamed(text)},
        "/v1/responses": {"post": _streamed(response)},
        "/v1/responses/{id}": {
            "get": _call("A response by its id", "Response", names=("id",)),
            "delete": _call("Cancels a response and erases it", "Deleted", names=("id",)),
        },
        "/v1/responses/{id}/cancel": {"post": _call("Cancels a response", "Response", names=("id",))},
        "/v1/models": {"get": _call("The served models", "List")},
        "/v1/models/{model}": {"get": _call("A served model", "Model", names=("model",))},
        "/v1/requests/{id}": {
            "get": _call("State, place and result of a request", "Request", names=("id",)),
            "delete": _call("Cancels a request and erases its result", "Erased", names=("id",)),
        },
        "/v1/files": {
            "get": _call("Files", "List", query={**PAGES, "purpose": TEXT}),
            "post": _with_body(_call("Uploads a file", "File", refusals=OVERLOADS), "multipart/form-data", upload),
        },
        "/v1/files/{id}": {
            "get": _call("A file", "File", names=("id",)),
            "delete": _call("Deletes a file", "Deleted", names=("id",), refusals={"409": "In use"}),
        },
        "/v1/files/{id}/content": {"get": _call("The bytes of a file", "application/octet-stream", names=("id",))},
        "/v1/batches": {
            "get": _call("Batches", "List", query=PAGES),
            "post": _call("Begins a batch", "Batch", body=NewBatch, refusals=OVERLOADS),
        },
        "/v1/batches/{id}": {"get": _call("A batch", "Batch", names=("id",))},
        "/v1/batches/{id}/cancel": {"post": _call("Cancels a batch", "Batch", names=("id",), refusals={"409": "It has ended"})},
        "/health": {"get": {**_call("Whether the process lives", "Status"), "security": []}},
        "/readiness": {"get": {**_call("Whether it serves", "Status"), "security": []}},
    }
    bodies = [(body, "validation") for body in (ChatBody, CompletionBody, ResponsesBody, NewBatch)]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    answers = {name: {"type": "object", "required": list(fields)} for name, fields in OBJECTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "QLM", "version": version("qlm-serving"), "description": "The OpenAI API of a gateway: docs/reference/http.md"},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], **answers, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _call(
    summary: str,
    answer: str,
    *,
    body: type[BaseModel] | None = None,
    names: Sequence[str] = (),
    query: Mapping[str, Schema] = {},
    headers: Mapping[str, Schema] = {},
    refusals: Mapping[str, str] = {},
    enqueues: bool = False,
) -> Schema:
    """An operation. `answer`: a schema, or a type of content. `names`: parameters within the path."""
    parameters = [{"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}} for name in names]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    parameters += [{"name": name, "in": "header", "schema": schema} for name, schema in headers.items()]
    content = {answer: {}} if "/" in answer else _json(answer)
    answers = {"200": {"description": summary, "content": content}}
    if enqueues:
        answers["202"] = {"description": "Enqueued (x-qlm-mode)", "content": _json("Request")}
    for status, why in sorted({**REFUSALS, **ALWAYS, **refusals}.items()):
        answers[status] = {"description": why, "content": _json("Error")}
    found: Schema = {"summary": summary, "parameters": parameters, "responses": answers}
    return found if body is None else _with_body(found, "application/json", _ref(body.__name__))


def _with_body(call: Schema, content_type: str, schema: Schema) -> Schema:
    return {**call, "requestBody": {"required": True, "content": {content_type: {"schema": schema}}}}


def _streamed(call: Schema) -> Schema:
    """With `stream: true` the answer is events."""
    call["responses"]["200"]["content"]["text/event-stream"] = {}
    return call


def _json(name: str) -> Schema:
    return {"application/json": {"schema": _ref(name)}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def reference() -> str:
    """The document, with a line for each route and each schema."""
    text = json.dumps(document(), separators=(",", ":"))
    return re.sub(r',("(?:/[^"]*|[A-Z]\w*)":\{)', r",\n\1", text) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
