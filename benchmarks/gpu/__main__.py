"""Runs all checks, or the named ones, and prints their results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import checks, host, summary

EXIT_PASSED, EXIT_FAILED, EXIT_NO_GPU = 0, 1, 3
NAMES = tuple(each.name for each in checks.checks("cuda", None, small=False))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Checks QLM on this machine's GPU.",
        epilog="Exit codes: 0 nothing failed; 1 a check failed, or none could run; 2 wrong use; 3 no usable GPU.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu-check"), help="folder for logs, figures and summary.json")
    parser.add_argument("--cpu", action="store_true", help="a dry run on the CPU with small sizes: shows that the checks work, no more")
    parser.add_argument("--model", type=Path, help="folder of a model to serve; default: a tiny one of noise")
    parser.add_argument("--only", action="append", choices=NAMES, help="a check; may be repeated")
    chosen = parser.parse_args(arguments)
    found = host.read_host()
    if found.problem and not chosen.cpu:
        sys.stderr.write(f"no GPU: {found.problem}. `--cpu` is a dry run without one.\n")
        return EXIT_NO_GPU
    chosen.out.mkdir(parents=True, exist_ok=True)
    device = "cpu" if chosen.cpu else "cuda"
    model = _model(chosen.model, found, chosen.out)
    outcomes = []
    for check in checks.checks(device, model, small=chosen.cpu):
        if chosen.only and check.name not in chosen.only:
            continue
        sys.stderr.write(f"{check.name} ...\n")
        outcomes.append(checks.run(check, found, chosen.out.resolve()))
    against = _against(outcomes)
    summary.write(chosen.out / "summary.json", found, outcomes, against)
    sys.stdout.write(f"{summary.table(found, outcomes, against)}\n\n{chosen.out / 'summary.json'}\n")
    passed = any(outcome.status == "passed" for outcome in outcomes)
    return EXIT_PASSED if passed and not any(outcome.status == "failed" for outcome in outcomes) else EXIT_FAILED


def _model(given: Path | None, found: host.Host, out: Path) -> Path | None:
    """The given one; else one of noise, if its maker is installed."""
    if given is not None or not found.vllm:
        return given
    from qlm_cli.models.random_llama import make_random_model

    folder = out / "model"
    if not folder.exists():
        make_random_model(folder, seed=1)
    return folder.resolve()


def _against(outcomes: Sequence[checks.CheckOutcome]) -> Mapping[str, Any]:
    timed = next((outcome.report for outcome in outcomes if outcome.name == "torch_timing" and outcome.report), None)
    if timed is None:
        return {}
    try:
        from benchmarks.gpu.against_profiles import compare_with_row
    except ImportError as error:
        return {"why": f"QLM's packages are not installed here ({error})"}
    return compare_with_row(timed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
