"""`python -m qlm_load`: the demo, replays against a running cluster, and campaigns of kills."""

from __future__ import annotations

import click

from qlm_load.campaign_command import campaign
from qlm_load.demo_command import demo
from qlm_load.replay_command import replay


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Loads for QLM: the demo, replays against a running cluster, and campaigns of kills."""


main.add_command(demo)
main.add_command(replay)
main.add_command(campaign)

if __name__ == "__main__":
    main(prog_name="python -m qlm_load")
