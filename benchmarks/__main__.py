"""`python -m benchmarks`: what QLM costs and how good its decisions and predictions are."""

from __future__ import annotations

import click

from benchmarks.agent.command import agent
from benchmarks.estimator.command import estimator
from benchmarks.evaluate.command import evaluate
from benchmarks.gateway.command import gateway
from benchmarks.planner.command import planner
from benchmarks.queue.command import queue


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Measure what QLM costs, and how good its decisions and predictions are."""


for command in (queue, gateway, agent, estimator, planner, evaluate):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
