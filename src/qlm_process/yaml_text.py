"""YAML as it is checked before anything reads it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


def parse_yaml(text: str) -> object:
    """A document. Raises ValueError for what is none, is too deep or has a key twice; it quotes none of the text, which may
    hold passwords."""
    try:
        document: object = yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError("not YAML: too deep") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: of a date that is none
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or type(error).__name__
        raise ValueError(f"not YAML: {problem}{f' (line {mark.line + 1})' if mark else ''}") from error
    return document


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: the second would replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice, in lines {lines[key.value]} and {line}")
                lines[key.value] = line
        return super().construct_mapping(node, deep)
