"""Rules of a request's names: those of `tenant`, `application` and `request_id` in request.proto."""

from __future__ import annotations

from qlm_core.vocabulary.errors import invalid_field

DEFAULT_TENANT = "default"
TENANT_BYTES_MAX = 64
REQUEST_ID_BYTES_MAX = 128
APPLICATION_BYTES_MAX = 64


def checked_tenant(name: str) -> str:
    """The tenant, by its name or by default. Raises InvalidRequest."""
    if name:
        check_name("tenant", name, TENANT_BYTES_MAX)
    return name or DEFAULT_TENANT


def check_application(label: str) -> None:
    """Raises InvalidRequest for a label that is too long."""
    if len(label.encode()) > APPLICATION_BYTES_MAX:
        raise invalid_field("application", f"at most {APPLICATION_BYTES_MAX} bytes")


def check_name(field: str, name: str, bytes_max: int) -> None:
    """Raises InvalidRequest for a name that is empty, too long or not printable ASCII."""
    if not (1 <= len(name) <= bytes_max and name.isascii() and name.isprintable()):
        raise invalid_field(field, f"1 to {bytes_max} bytes of printable ASCII")
