"""docs/reference/configuration.md, written from the settings classes: `python -m qlm_cli.reference.settings`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import yaml
from pydantic import BaseModel

from qlm_cli.options import default_config_path

HEAD = """# Configuration

<!-- Written by `make docs` from the settings classes. -->

All processes read one YAML file; each reads the sections it knows, and refuses names that nobody knows. Later wins:

1. the defaults below
2. the section in the file: `agent: {...}` holds for all agents
3. the entry of a list, chosen by `--name`: `agents: [{name: a100-0, ...}]` takes the settings of `agent`
4. the environment: `QLM_QUEUE__DURABILITY=disk` is `durability` in `queue`; `QLM_CONFIG` is the file itself
5. the command line: `--set queue.durability=disk`, and for one entry of a list `--set agents.a100-0.gpu=H100-80GB`

A wrong value stops the process with its name and what it may be (exit code 2). Traces follow the standard `OTEL_*` variables:
`OTEL_EXPORTER_OTLP_ENDPOINT` (gRPC) turns them on, `OTEL_TRACES_SAMPLER` samples them. Units are the last word of a name: `_s` seconds,
`_tokens` tokens.
"""

SECTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("queue", "The queue; the same for all processes.", "qlm_process.settings", "QueueSettings"),
    ("models", "A list: the served models.", "qlm_process.settings", "ModelSettings"),
    ("gateway", "Entries in `gateways`.", "qlm_gateway.config", "GatewaySettings"),
    ("planner", "Entries in `planners`; all but one are standbys.", "qlm_planner.config", "PlannerSettings"),
    ("estimator", "Entries in `estimators`; all but one are standbys.", "qlm_estimator.config", "EstimatorSettings"),
    ("agent", "Entries in `agents`, one an instance.", "qlm_agent.config", "AgentSettings"),
    ("security", "Keys and TLS; the same for all processes ([how to](../howto/secure.md)).", "qlm_process.settings", "SecuritySettings"),
    ("telemetry", "Logs and metrics.", "qlm_process.settings", "TelemetrySettings"),
    ("up", "Supervision by `qlm up`.", "qlm_cli.up.config", "UpSection"),
    ("load", "The run of `make demo`.", "qlm_load.demo.settings", "LoadSection"),
)
"""Section, what it is, module and class."""

Schema = Mapping[str, Any]


def reference() -> str:
    parts = [HEAD]
    for name, text, module, attribute in SECTIONS:
        settings = getattr(import_module(module), attribute)
        parts.append(f"## `{name}`\n\n{text}\n\n" + "\n".join(_table(settings)) + "\n")
    with open(default_config_path(), encoding="utf-8") as file:
        parts.append(f"## The file that ships\n\n```yaml\n{file.read()}```\n")
    return "\n".join(parts)


def _table(settings: type[BaseModel]) -> Iterator[str]:
    yield "| setting | default | may be | meaning |"
    yield "|---|---|---|---|"
    schema = settings.model_json_schema()
    for path, field, required in _fields(schema, schema.get("$defs", {}), ()):
        default = "(required)" if required else f"`{_shown(field.get('default'))}`"
        meaning = str(field.get("description", "")).replace("\n", " ").replace("|", "\\|")
        yield f"| `{'.'.join(path)}` | {default} | {_may_be(field)} | {meaning} |"


def _fields(schema: Schema, definitions: Schema, path: Sequence[str]) -> Iterator[tuple[Sequence[str], Schema, bool]]:
    """All settings of a section, those of nested sections after it under their dotted path, and those of a list's entries as `name[]`."""
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        target = _resolved(field, definitions)
        if "properties" in target:
            yield from _fields(target, definitions, (*path, name))
        else:
            yield (*path, name), {**target, **field}, name in required
            entry = _resolved(field.get("items", {}), definitions)
            if "properties" in entry:
                yield from _fields(entry, definitions, (*path, f"{name}[]"))


def _resolved(field: Schema, definitions: Schema) -> Schema:
    parts = (*field.get("allOf", ()), *field.get("anyOf", ()))  # one that may be absent is any of the section and nothing
    reference = field.get("$ref") or next((part["$ref"] for part in parts if "$ref" in part), None)
    resolved: Schema = definitions[reference.rpartition("/")[2]] if reference else field
    return resolved


def _shown(value: object) -> str:
    """A default as it is written in YAML."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n").removesuffix("\n...")


def _may_be(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "anyOf" in field:
        return " or ".join(_may_be(part) for part in field["anyOf"])
    bounds: list[str] = [
        f"{sign} {field[key]:,}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
        if key in field
    ]
    lengths = [f"{sign} {field[key]} characters" for key, sign in (("minLength", "at least"), ("maxLength", "at most")) if key in field]
    kind = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`", "null": "nothing"}
    return " ".join([kind.get(str(field.get("type")), str(field.get("type"))), ", ".join([*bounds, *lengths])]).strip()


if __name__ == "__main__":
    sys.stdout.write(reference())
