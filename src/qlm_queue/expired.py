"""The Result of a request that `pull` finds expired; see "A terminal step" in port.py."""

from __future__ import annotations

from qlm.api.v1.request_pb2 import Result, ResultError

EXPIRED_RESULT = Result(error=ResultError(reason="EXPIRED", message="expire_after_s passed before the request ended")).SerializeToString()
