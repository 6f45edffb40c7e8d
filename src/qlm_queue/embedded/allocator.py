"""The memory allocator of the embedded server.

The server of the wheel takes that of the C library. With hundreds of thousands of requests in it, glibc's searches the heap for most of
what a script writes: half of the server's time, and twice the memory (docs/adr/0007). So the server runs with mimalloc where that is
installed, as it is with this package on Linux, and else with settings of glibc's that help a little.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata

PACKAGE = "cmeel-mimalloc"
LIBRARY = "libmimalloc.so"

GLIBC_TUNABLES = "glibc.malloc.tcache_count=2000:glibc.malloc.mxfast=0"
"""Without it: glibc keeps 7 free pieces of each small size at hand. 2,000 are what a script of 500 requests frees, and take at most 66 MB;
more are faster, and take as much memory again as the requests (docs/adr/0007)."""


def environment(base: Mapping[str, str], package: str = PACKAGE) -> dict[str, str]:
    """The environment of a server, from that of its parent, whose own choice stands."""
    library = preload(package)
    if library is None:
        return {"GLIBC_TUNABLES": GLIBC_TUNABLES, **base}
    # Other preloaded libraries (a test's, a profiler's) come first.
    return {**base, "LD_PRELOAD": " ".join(part for part in (base.get("LD_PRELOAD", ""), library) if part)}


def preload(package: str = PACKAGE) -> str | None:
    """The path of the library, None where it is not installed."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    found = (str(file.locate()) for file in files if file.name == LIBRARY)
    return next((path for path in found if os.path.isfile(path) and " " not in path and ":" not in path), None)
