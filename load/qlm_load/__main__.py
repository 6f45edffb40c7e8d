"""`python -m qlm_load`: the demo and its picture, replays, simulated runs, comparisons of policies, campaigns of kills."""

from __future__ import annotations

import click

from qlm_load.campaign.command import campaign
from qlm_load.compare.commands import compare, simulate
from qlm_load.demo.command import demo
from qlm_load.demo.vllm_command import demo_vllm
from qlm_load.matrix.command import matrix
from qlm_load.picture.command import picture
from qlm_load.replay.command import replay


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Loads for QLM: the demo and its picture, replays against a running cluster, simulated runs and campaigns of kills."""


main.add_command(demo)
main.add_command(demo_vllm)
main.add_command(picture)
main.add_command(replay)
main.add_command(simulate)
main.add_command(compare)
main.add_command(matrix)
main.add_command(campaign)

if __name__ == "__main__":
    main(prog_name="python -m qlm_load")
