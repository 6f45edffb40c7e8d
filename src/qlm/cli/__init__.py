"""The `qlm` command. Nothing here is imported by the SDK."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of `qlm`. Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 the request did not end COMPLETED."""
    # Late: `import qlm.cli` costs nothing.
    from qlm.cli.root import root

    try:
        try:
            root(prog_name="qlm")
        finally:
            if sys.stdout is not None:  # closed
                sys.stdout.flush()
    except OSError as error:  # most often of a full disk behind standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or what is left there fails again at the end
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"Error: {error}")
