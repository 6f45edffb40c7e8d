"""The examples in the documents run as they are written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .gateway_rig import Rig, open_rig

PAGE = Path(__file__).parents[2] / "docs" / "streaming.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_an_example_runs(rig: Rig, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = await rig.gateway(), await rig.gateway()
    rig.serve()
    source = EXAMPLES[number].replace("127.0.0.1:50051", one.address).replace("127.0.0.1:50052", two.address)
    await asyncio.to_thread(exec, compile(source, f"{PAGE.name} example {number}", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out


def test_the_page_has_examples() -> None:
    assert len(EXAMPLES) >= 4
