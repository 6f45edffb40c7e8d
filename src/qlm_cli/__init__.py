"""The `qlm` command: arguments in; processes, calls of the SDK and printed answers out. The SDK imports nothing of it."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of `qlm`. Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 the request did not end COMPLETED."""
    # Late: `import qlm_cli` costs nothing.
    try:
        from qlm_cli.root import root
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("Error: only the client library is installed; the qlm command needs: pip install 'qlm-serving[server]'")

    try:
        try:
            root(prog_name="qlm")
        finally:
            if sys.stdout is not None:  # closed
                sys.stdout.flush()
    except OSError as error:  # most often of a full disk behind standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or what is left there fails again at the end
        sys.exit(1 if isinstance(error, BrokenPipeError) else f"Error: {error}")
