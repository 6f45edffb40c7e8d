"""JSON of commands: no figure in it that readers of JSON refuse."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from qlm.values import GroupStatus
from qlm_cli.json_text import json_text


def refuse(name: str) -> object:
    raise AssertionError(f"{name} is no JSON")


def test_a_group_without_a_deadline() -> None:
    group = GroupStatus(group_id="g", model="m", slo_kind="priority", slo_class="p3", waiting=2, first_deadline_s=math.inf)
    read = json.loads(json_text({"groups": (asdict(group),)}), parse_constant=refuse)
    assert read == {"groups": [{**asdict(group), "first_deadline_s": None}]}


@pytest.mark.parametrize("value", [0, -1.5, True, None, "text", [], {}, 2**60])
def test_the_rest_is_as_it_was(value: object) -> None:
    assert json.loads(json_text({"a": [value]})) == {"a": [value]}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_number_is_null(value: float) -> None:
    assert json_text([value]) == "[null]"
