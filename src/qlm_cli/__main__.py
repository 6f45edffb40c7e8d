"""`python -m qlm_cli`."""

from __future__ import annotations

from qlm_cli import main

if __name__ == "__main__":
    main()
