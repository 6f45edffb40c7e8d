"""What the checks came to: a table for people, and summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qlm_load.gpu_check.checks import Outcome
from qlm_load.gpu_check.host import Host


def table(host: Host, outcomes: Sequence[Outcome], against: Mapping[str, Any]) -> str:
    """Lines of text."""
    lines = [f"{host.gpu}; driver {host.driver or '-'}, PyTorch {host.torch or '-'}, vLLM {host.vllm or '-'}", ""]
    width = max(len(outcome.name) for outcome in outcomes)
    lines += [f"{each.status:<8} {each.name:<{width}} {each.took_s:7.0f} s  {each.why}".rstrip() for each in outcomes]
    if "table" in against:
        lines += ["", f"timed with PyTorch, beside the row of {against['model']} on {against['gpu']} ({against['origin']}):"]
        lines += [
            f"  {name:<48} {row['timed']:>12,.4g} {row['row']:>12,.4g}  x {row['ratio']:.2f}" for name, row in against["table"].items()
        ]
    elif "why" in against:
        lines += ["", f"not compared with a row: {against['why']}"]
    return "\n".join(lines)


def write(path: Path, host: Host, outcomes: Sequence[Outcome], against: Mapping[str, Any]) -> None:
    """`path`: of summary.json."""
    document = {"host": asdict(host), "checks": [asdict(outcome) for outcome in outcomes], "against_profiles": dict(against)}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
