"""API keys. A key is 32 random bytes, shown once; kept are a salt and the HMAC-SHA256 of the key under it."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from pydantic import Field

from qlm_core.vocabulary.errors import Unauthenticated
from qlm_core.vocabulary.name_rules import TENANT_BYTES_MAX
from qlm_core.vocabulary.slo_rules import PRIORITY_MAX, SLO_S_MAX
from qlm_process.settings import Section

AUTHORIZATION = "authorization"
SCHEME = "Bearer "
PREFIX = "qlm"
RATE_MAX = 1e12
ID_BYTES, SALT_BYTES, SECRET_BYTES = 4, 16, 32


class Role(StrEnum):
    """Purpose of a key: a tenant's requests; control of the cluster and the status of all; calls between services."""

    CLIENT = "client"
    OPERATOR = "operator"
    SERVICE = "service"


class Key(Section):
    """A row of the key file. `models`: those it may use; none: all. `slo_s_min`: the least SLO, in seconds. `priority_min`: the most
    urgent strict priority; None: no strict priority. `requests_per_min`, `prompt_tokens_per_min`: rates at each gateway; None: no bound.
    `streams_max`: streams and waits for an end at once, at each gateway."""

    id: str = Field(pattern=rf"^[0-9a-f]{{{2 * ID_BYTES}}}$")
    salt: str = Field(pattern=rf"^[0-9a-f]{{{2 * SALT_BYTES}}}$")
    hash: str = Field(pattern=r"^[0-9a-f]{64}$")
    role: Role = Role.CLIENT
    tenant: str = Field(min_length=1, max_length=TENANT_BYTES_MAX, pattern=r"^[ -~]+$")
    models: tuple[str, ...] = ()
    slo_s_min: float = Field(0.0, ge=0.0, le=SLO_S_MAX)
    priority_min: int | None = Field(None, ge=-PRIORITY_MAX, le=PRIORITY_MAX)
    requests_per_min: float | None = Field(None, ge=1.0, le=RATE_MAX)
    prompt_tokens_per_min: float | None = Field(None, ge=1.0, le=RATE_MAX)
    streams_max: int | None = Field(None, ge=1)

    @property
    def rates(self) -> dict[str, float]:
        """Its bounds a minute, by name."""
        rates = {"requests_per_min": self.requests_per_min, "prompt_tokens_per_min": self.prompt_tokens_per_min}
        return {name: per_min for name, per_min in rates.items() if per_min is not None}

    def matches(self, secret: str) -> bool:
        """In constant time."""
        return hmac.compare_digest(self.hash, _hash(self.salt, secret))


def new_key(role: Role, tenant: str, **bounds: Any) -> tuple[Key, str]:
    """A row and the key itself, "qlm_<id>_<secret>". `bounds`: further fields of `Key`. Raises pydantic's ValidationError."""
    identifier, salt, secret = secrets.token_hex(ID_BYTES), secrets.token_hex(SALT_BYTES), secrets.token_hex(SECRET_BYTES)
    row = Key(id=identifier, salt=salt, hash=_hash(salt, secret), role=role, tenant=tenant, **bounds)
    return row, f"{PREFIX}_{identifier}_{secret}"


def split_key(text: str) -> tuple[str, str]:
    """The id and the secret of a key. Raises Unauthenticated."""
    prefix, _, rest = text.partition("_")
    identifier, _, secret = rest.partition("_")
    if prefix != PREFIX or not secret or not secret.isascii():
        raise unknown_key()
    return identifier, secret


def bearer_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The key that a call carries. Raises Unauthenticated where it carries none."""
    for name, value in metadata or ():
        if name.lower() == AUTHORIZATION and isinstance(value, str) and value.startswith(SCHEME):
            return value.removeprefix(SCHEME).strip()
    raise Unauthenticated("no API key: send the header authorization: Bearer KEY")


def unknown_key() -> Unauthenticated:
    """For a key that never was and for one that was revoked."""
    return Unauthenticated("the API key is not valid")


def _hash(salt: str, secret: str) -> str:
    return hmac.digest(bytes.fromhex(salt), secret.encode(), "sha256").hex()
