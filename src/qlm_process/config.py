"""One YAML file for all processes; each reads the sections it knows.

Later wins: defaults < a section < an entry of its list < QLM_* variables < overrides. `agents: [{name: a100-0, ...}]` is a list of
entries for the section `agent`, chosen by name. QLM_QUEUE__URL and the override `queue.url` both set `url` in `queue`; a part of a path
names an entry of a list of named mappings by its name: `agents.a100-0.gpu`. Values are taken as text, which the settings classes
convert; those that begin with "[" or "{" are read as YAML.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from qlm_core.vocabulary.errors import ConfigError
from qlm_process.yaml_text import parse_yaml

SERVICES = ("gateway", "planner", "estimator", "agent")
KNOWN_SECTIONS = frozenset({"queue", "models", *SERVICES, *(f"{name}s" for name in SERVICES), "telemetry", "security", "up", "load"})
"""Top-level names of the file. A process ignores those of others and refuses every other name."""

FILE_VARIABLE = "QLM_CONFIG"
OVERRIDES_VARIABLE = "QLM_OVERRIDES"
"""A JSON object of overrides, which `qlm up` gives to its processes: everybody on the machine can read command lines."""
ENVIRONMENT_PREFIX = "QLM_"
ENVIRONMENT_SEPARATOR = "__"

T = TypeVar("T", bound=BaseModel)
Tree = dict[str, object]


def load_config(
    cls: type[T],
    path: str | None,
    section: str | None = None,
    entry: str | None = None,
    overrides: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> T:
    """Reads, merges and checks the settings of one process. `path`: None takes the file that QLM_CONFIG names, if it does.

    `section`, `entry`: merge the entry of that name of the list `section` ("agents") into the section without its s ("agent"); without
    the list the name alone is taken. `environment`: `os.environ` by default. Raises ConfigError naming the setting and what it may be.
    """
    environment = os.environ if environment is None else environment
    tree = _read(path or environment.get(FILE_VARIABLE) or None)
    settings: list[tuple[list[str], object]] = []
    settings += _environment_overrides(environment)
    given = json.loads(environment.get(OVERRIDES_VARIABLE, "{}")) | dict(overrides or {})
    settings += [(key.split("."), value) for key, value in given.items()]
    # Settings of the one section override its list entry, so they are applied after the merge; all others, lists included, before it.
    single = section.removesuffix("s") if section is not None and entry is not None else None
    for parts, value in settings:
        if parts[0] != single:
            _put(tree, parts, value)
    if single is not None and section is not None and entry is not None:
        _merge_entry(tree, single, section, entry)
    for parts, value in settings:
        if parts[0] == single:
            _put(tree, parts, value)
    for name in tree:
        if name not in KNOWN_SECTIONS and name not in cls.model_fields:
            raise ConfigError(f"{name}: unknown section; may be one of {', '.join(sorted(KNOWN_SECTIONS))}")
    try:
        return cls.model_validate({name: value for name, value in tree.items() if name in cls.model_fields})
    except ValidationError as error:
        raise ConfigError(_explain(error, cls)) from error


def parse_override(text: str) -> tuple[str, str]:
    """ "queue.url=redis://h" -> ("queue.url", "redis://h"). Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text!r}: a setting is given as section.name=value")
    return key, value


def _read(path: str | None) -> Tree:
    if path is None:
        return {}
    try:
        document = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping of sections")
    return {str(name): value for name, value in document.items() if value is not None}


def _merge_entry(tree: Tree, single: str, section: str, entry: str) -> None:
    chosen: Mapping[str, object] = {}
    if section != single and section in tree:
        entries = _by_name(tree[section], section)
        if entry not in entries:
            raise ConfigError(f"{section}: has no entry {entry!r}; may be one of {', '.join(entries)}")
        chosen = entries[entry]
    base = tree.get(single, {})
    if not isinstance(base, dict):
        raise ConfigError(f"{single}: must be a mapping")
    tree[single] = _merged({**base, "name": entry}, chosen)


def _by_name(entries: object, section: str) -> dict[str, Tree]:
    if not isinstance(entries, list) or not all(isinstance(each, dict) and "name" in each for each in entries):
        raise ConfigError(f"{section}: must be a list of entries with a name")
    return {str(each["name"]): each for each in entries}


def _merged(base: Mapping[str, object], over: Mapping[str, object]) -> Tree:
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        result[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _environment_overrides(environment: Mapping[str, str]) -> Iterator[tuple[list[str], str]]:
    """Those variables that name a section; QLM_CONFIG and the like belong to the commands."""
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX):
            parts = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split(ENVIRONMENT_SEPARATOR)
            if parts[0] in KNOWN_SECTIONS:
                yield parts, environment[variable]


def _put(tree: Tree, parts: list[str], value: object) -> None:
    """Sets a value under a path, making mappings on the way; a YAML-like text is read as YAML."""
    setting = ".".join(parts)
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = parse_yaml(value)
        except ValueError as error:
            raise ConfigError(f"{setting}: cannot be read as YAML: {error}") from error
    node: Tree = tree
    for depth, part in enumerate(parts[:-1], start=1):
        child = node.setdefault(part, {})
        if isinstance(child, list):
            child = _by_name(child, part)
            if depth == len(parts) - 1 or parts[depth] not in child:
                raise ConfigError(f"{setting}: {part} has the entries {', '.join(child)}; give one of them and a setting of it")
        if not isinstance(child, dict):
            raise ConfigError(f"{setting}: {part} is not a mapping")
        node = child
    node[parts[-1]] = value


def _explain(error: ValidationError, cls: type[BaseModel]) -> str:
    """Every wrong setting: its name, what is wrong, the valid values and, except for URLs, which may hold passwords, the value given."""
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"]) or "configuration"
        if problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown setting; may be one of {', '.join(_names_beside(cls, problem['loc']))}")
        else:
            shown = isinstance(problem["input"], (str, int, float)) and not where.endswith("url") and problem["type"] != "missing"
            given = f" (given: {problem['input']!r})" if shown else ""
            lines.append(f"{where}: {problem['msg']}{given}")
    return "; ".join(lines)


def _names_beside(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The settings that may stand where an unknown one was found."""
    model: type[BaseModel] = cls
    for part in location[:-1]:
        if isinstance(part, str) and part in model.model_fields:
            inner = _model_in(model.model_fields[part].annotation)
            if inner is None:
                return []
            model = inner
    return sorted(model.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if (found := _model_in(argument)) is not None:
            return found
    return None
