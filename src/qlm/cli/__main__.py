"""`python -m qlm.cli`."""

from __future__ import annotations

from qlm.cli import main

if __name__ == "__main__":
    main()
