"""Results of the checks: a table for people, and summary.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import CheckOutcome
from benchmarks.gpu.host import Host


def transfer_share(outcomes: Sequence[CheckOutcome]) -> Mapping[str, float]:
    """Speed of a model's load from host memory, as a share of one long copy from pinned memory; nothing if either was not measured."""
    report = {outcome.name: outcome.report for outcome in outcomes if outcome.report}
    try:
        limit_gb_s = float(report["torch_timing"]["transfers"]["host_to_device_gb_s"])
        bench = report["bench_agent"]
        gb = 1e-3 * float(bench["context"]["parts"]["model_swap"]["weights_mb"])
        swap_gb_s = gb / (1e-3 * float(bench["swap_ms"]["active_from_warm"]))
    except (KeyError, TypeError, ZeroDivisionError):
        return {}
    return {"weights_gb": gb, "swap_gb_s": swap_gb_s, "limit_gb_s": limit_gb_s, "share": swap_gb_s / limit_gb_s}


def table(host: Host, outcomes: Sequence[CheckOutcome], against: Mapping[str, Any]) -> str:
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
    if share := transfer_share(outcomes):
        lines += ["", "a model of {weights_gb:.3g} GB from host memory: {swap_gb_s:.3g} GB/s, {share:.0%} of a long copy".format(**share)]
    return "\n".join(lines)


def write(path: Path, host: Host, outcomes: Sequence[CheckOutcome], against: Mapping[str, Any]) -> None:
    """`path`: of summary.json."""
    document = {
        "host": asdict(host),
        "checks": [asdict(outcome) for outcome in outcomes],
        "against_profiles": dict(against),
        "swap_transfer": dict(transfer_share(outcomes)),
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
