"""The examples in the documents run as they are written."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from .gateway_rig import Rig

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    (page, source)
    for page in ("README.md", "docs/quickstart/simulated.md", "docs/howto/stream-and-resume.md")
    for source in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_an_example_runs(rig: Rig, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = await rig.gateway(), await rig.gateway()
    rig.serve()
    page, example = EXAMPLES[number]
    source = example.replace("127.0.0.1:50051", one.address).replace("127.0.0.1:50052", two.address)
    await asyncio.to_thread(exec, compile(source, f"{page} example {number}", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out


def test_the_pages_have_examples() -> None:
    assert len(EXAMPLES) >= 5
