"""Callers and their rights. Every call of every front passes here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from qlm.api.v1.gateway_pb2 import QueueStatusResponse
from qlm.api.v1.request_pb2 import Request, Slo, SloKind
from qlm_core.vocabulary.errors import NotFound, PermissionDenied
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.admission.rules import request_key
from qlm_gateway.front.rates import KeyRates
from qlm_process.identity.key_ring import KeyRing
from qlm_process.identity.keys import Key, Role, bearer_of

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`key`: None where calls need no keys; then a tenant is what the call says, and everything is allowed."""

    key: Key | None = None

    @property
    def is_operator(self) -> bool:
        return self.key is None or self.key.role is Role.OPERATOR

    def check_operator(self) -> None:
        """Raises PermissionDenied."""
        if not self.is_operator:
            raise PermissionDenied("only an operator's key may do this")

    def tenant(self, claim: str) -> str:
        """The tenant of a call that names `claim`. Raises PermissionDenied for another tenant than the key's."""
        if self.key is None:
            return claim
        if claim not in ("", self.key.tenant):
            raise _denied("tenant", "absent, or the API key's own")
        return self.key.tenant

    def request_key(self, claim: str, request_id: str, *, of_any: bool = False) -> RequestKey:
        """The key of a request that a call names. Another tenant's does not exist for it, unless an operator may name it (`of_any`). Raises
        InvalidRequest, NotFound."""
        if self.key is None or (of_any and self.is_operator and claim):
            return request_key(claim, request_id)
        key = request_key(self.key.tenant, request_id)
        if claim not in ("", self.key.tenant):
            raise NotFound("no such request", details={"tenant": request_key(claim, request_id).tenant, "request_id": request_id})
        return key

    def admit(self, request: Request, default_slo_s: float) -> None:
        """Gives a request the key's tenant, and the key's least SLO where it names none and the default is below it. Raises
        PermissionDenied."""
        request.tenant = self.tenant(request.tenant)
        key = self.key
        if key is None:
            return
        if key.models and request.model not in key.models:
            raise _denied("model", "one that this API key may use", repr(request.model[:128]))
        slo = request.slo
        if not request.HasField("slo"):
            if default_slo_s < key.slo_s_min:
                request.slo.CopyFrom(Slo(kind=SloKind.SLO_KIND_COMPLETION, seconds=key.slo_s_min))
        elif slo.kind != SloKind.SLO_KIND_PRIORITY:
            if slo.seconds < key.slo_s_min:
                raise _denied("slo.seconds", f"at least {key.slo_s_min:g} with this API key", f"{slo.seconds:g}")
        elif key.priority_min is None:
            raise _denied("slo.priority", "absent: this API key has no strict priorities", str(slo.priority))
        elif slo.priority < key.priority_min:
            raise _denied("slo.priority", f"at least {key.priority_min} with this API key", str(slo.priority))

    def may_use(self, model: str) -> bool:
        return self.key is None or not self.key.models or model in self.key.models

    def part_of(self, status: QueueStatusResponse) -> QueueStatusResponse:
        """Reduces the queue's status to the caller's rights: an operator sees all, a tenant its own request and pauses."""
        if self.key is None or self.is_operator:
            return status
        seen = QueueStatusResponse(queue=status.queue, refusal=status.refusal)
        seen.pauses.extend(each for each in status.pauses if (self.may_use(each.model) if each.model else each.tenant == self.key.tenant))
        if status.HasField("request"):
            seen.request.CopyFrom(status.request)
        return seen


class Callers:
    """`keys`: None where calls need none."""

    def __init__(self, keys: KeyRing | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._rates = KeyRates(monotonic)
        self._anyone = Caller()

    @property
    def need_keys(self) -> bool:
        return self._keys is not None

    def caller(self, metadata: Metadata | None) -> Caller:
        """Identifies the sender of a call. Raises Unauthenticated; PermissionDenied for a service's key, which is for other calls."""
        if self._keys is None:
            return self._anyone
        key = self._keys.find(bearer_of(metadata))
        if key.role is Role.SERVICE:
            raise PermissionDenied("a service's key may not call a gateway")
        return Caller(key=key)

    def admit(self, caller: Caller, request: Request, default_slo_s: float) -> None:
        """As `Caller.admit`; raises QueueFull RATE_LIMITED, too."""
        caller.admit(request, default_slo_s)
        if caller.key is not None:
            self._rates.take(caller.key)

    def accepted(self, caller: Caller, prompt_tokens: int) -> None:
        """A new request of the caller was accepted."""
        if caller.key is not None:
            self._rates.charge(caller.key, prompt_tokens)

    def rates_left(self, caller: Caller) -> dict[str, tuple[float, float, float]]:
        """See `KeyRates.left`; none without a key."""
        return {} if caller.key is None else self._rates.left(caller.key)

    def held(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        """As `KeyRing.held`, of a call that may last."""
        return nullcontext() if self._keys is None or caller.key is None else self._keys.held(caller.key)


def _denied(field: str, rule: str, value: str = "") -> PermissionDenied:
    return PermissionDenied(f"{field}: must be {rule}{f', not {value}' if value else ''}", details={"field": field, "rule": rule})
