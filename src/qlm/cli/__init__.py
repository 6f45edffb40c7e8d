"""The `qlm` command. Nothing here is imported by the SDK."""

from __future__ import annotations


def main() -> None:
    """Entry point of `qlm`. Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 the request did not end COMPLETED."""
    # Late: `import qlm.cli` costs nothing.
    from qlm.cli.root import root

    root(prog_name="qlm")
