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
        lines: dict[Hashable, int] = {}  # by text and by value: "on" is True, 0x1 is 1
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                names = {key.value} if key.tag.endswith(":merge") else {key.value, self.construct_object(key)}
                if twice := names & lines.keys():
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice, in lines {lines[twice.pop()]} and {line}")
                lines |= dict.fromkeys(names, line)
        return super().construct_mapping(node, deep)
