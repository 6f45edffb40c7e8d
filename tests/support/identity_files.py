"""Files of keys and of certificates, made for one test."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlm_process.identity.key_file import edited
from qlm_process.identity.keys import Role, new_key


def add_key(path: Path, tenant: str, role: Role = Role.CLIENT, **limits: Any) -> str:
    """A new key in the file."""
    row, key = new_key(role, tenant, **limits)
    with edited(str(path)) as rows:
        rows.append(row)
    return key


def revoke_key(path: Path, key: str) -> None:
    with edited(str(path)) as rows:
        rows[:] = [row for row in rows if row.id != key.split("_")[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """PEM files of an authority and of a certificate for 127.0.0.1 that it signed."""

    ca: str
    cert: str
    key: str

    def settings(self) -> dict[str, str]:
        return {"tls_cert_file": self.cert, "tls_key_file": self.key, "tls_ca_file": self.ca}


def make_certificates(folder: Path) -> Certificates:
    folder.mkdir()
    ca, ca_key, cert, key, request = (str(folder / name) for name in ("ca.pem", "ca.key", "cert.pem", "cert.key", "request.pem"))
    new = ("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for command in (
        (*new, "-x509", "-days", "2", "-subj", "/CN=test authority", "-keyout", ca_key, "-out", ca),
        (*new, "-subj", "/CN=127.0.0.1", "-keyout", key, "-out", request),
        ("openssl", "x509", "-req", "-days", "2", "-in", request, "-CA", ca, "-CAkey", ca_key, "-extfile", str(names), "-out", cert),
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    return Certificates(ca=ca, cert=cert, key=key)
