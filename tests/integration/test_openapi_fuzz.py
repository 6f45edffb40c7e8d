"""Calls drawn from docs/reference/openapi.json, valid and not: each is answered as the document says, and the gateway serves on."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS
from schemathesis.core.result import Ok

from qlm_cli.reference.openapi import document

from .gateway_rig import MODEL, PATIENCE_S, Rig
from .http_rig import HTTP, client_of

EXAMPLES = int(os.environ.get("QLM_FUZZ_EXAMPLES", "25"))
"""Calls of each operation, valid ones and as many others."""
OPERATIONS = {
    found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(document()).get_all_operations() if isinstance(found, Ok)
}
LEFT_OUT: list[Any] = CHECKS.get_by_names(["positive_data_acceptance"])
"""Calls that fit the schemas may still break a rule of admission, such as a temperature of 3: a 400 that names the field."""


def aimed(case: schemathesis.Case[Any]) -> schemathesis.Case[Any]:
    """Replaces the model of each call by one that is served: else most end there."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
    return case


@pytest.mark.parametrize("label", OPERATIONS)
async def test_calls_are_answered_as_the_document_says(
    rig: Rig, tmp_path: Path, label: str, record_property: Callable[[str, object], None]
) -> None:
    rig.serve(0.0)
    gateway = await rig.gateway(http=HTTP, batches={"folder": str(tmp_path / "files")}, context_tokens_max=64)
    url = gateway.gateway.http_url
    statuses: Counter[int] = Counter()

    def hammer(mode: schemathesis.GenerationMode) -> None:
        @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(OPERATIONS[label].as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case[Any]) -> None:
            answer = aimed(case).call(base_url=url, timeout=PATIENCE_S)
            case.validate_response(answer, excluded_checks=LEFT_OUT)
            statuses[answer.status_code] += 1

        check()

    await asyncio.to_thread(hammer, schemathesis.GenerationMode.POSITIVE)
    if OPERATIONS[label].body or OPERATIONS[label].query or OPERATIONS[label].headers:  # any text is a valid name of a path
        await asyncio.to_thread(hammer, schemathesis.GenerationMode.NEGATIVE)
    record_property("fuzzed calls", statuses.total())
    assert statuses
    async with client_of(url) as client:
        assert (await client.models.retrieve(MODEL)).id == MODEL
