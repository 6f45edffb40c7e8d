"""A client's API key and certificates, and how it checks servers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from qlm.errors import ConfigError

KEY_BYTES_MAX = 4096
Options = Sequence[tuple[str, str | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """`api_key`: sent with every call. `ca_file`: PEM file of the authorities that vouch for servers; "": no TLS. `cert_file`,
    `cert_key_file`: PEM files of the client's own certificate, for servers that ask for one. Raises ConfigError for a key that no header
    can hold, and for a certificate without its key or without `ca_file`."""

    api_key: str = field(default="", repr=False)
    ca_file: str = ""
    cert_file: str = ""
    cert_key_file: str = ""

    def __post_init__(self) -> None:
        if not (self.api_key.isascii() and self.api_key.isprintable() and len(self.api_key) <= KEY_BYTES_MAX):
            raise ConfigError(f"api_key: must be at most {KEY_BYTES_MAX} bytes of printable ASCII")
        if bool(self.cert_file) != bool(self.cert_key_file):
            raise ConfigError("cert_file, cert_key_file: give both or neither")
        if self.cert_file and not self.ca_file:
            raise ConfigError("ca_file: wanted beside cert_file")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def channel(self, address: str, options: Options = ()) -> grpc.Channel:
        """A blocking channel. Raises ConfigError for files that cannot be read."""
        if not self.ca_file:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self._tls(), options=options)

    def aio_channel(self, address: str, options: Options = ()) -> grpc.aio.Channel:
        """A channel of the running event loop. Raises ConfigError for files that cannot be read."""
        if not self.ca_file:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._tls(), options=options)

    def _tls(self) -> grpc.ChannelCredentials:
        own = (read_pem("cert_key_file", self.cert_key_file), read_pem("cert_file", self.cert_file)) if self.cert_file else (None, None)
        return grpc.ssl_channel_credentials(read_pem("ca_file", self.ca_file), *own)


def credentials_of(environment: Mapping[str, str] | None = None) -> Credentials:
    """Those that QLM_API_KEY or QLM_API_KEY_FILE, QLM_CA_FILE, QLM_CERT_FILE and QLM_CERT_KEY_FILE name. Raises ConfigError."""
    given = os.environ if environment is None else environment
    key_file = given.get("QLM_API_KEY_FILE", "")
    return Credentials(
        api_key=given.get("QLM_API_KEY", "").strip() or (read_key(key_file) if key_file else ""),
        ca_file=given.get("QLM_CA_FILE", ""),
        cert_file=given.get("QLM_CERT_FILE", ""),
        cert_key_file=given.get("QLM_CERT_KEY_FILE", ""),
    )


def read_key(path: str) -> str:
    """The key that a file holds. Raises ConfigError, which does not quote it."""
    try:
        with open(path, "rb") as file:
            key = file.read(KEY_BYTES_MAX).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ConfigError(f"{path}: no API key can be read: {reason}") from None
    if not key:
        raise ConfigError(f"{path}: holds no API key")
    return key


def read_pem(setting: str, path: str) -> bytes:
    """A file of certificates or of a key. Raises ConfigError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from None
