"""Leases and instances on a `MemoryState`."""

from __future__ import annotations

from dataclasses import replace

from qlm_core.vocabulary.errors import LeaseLost
from qlm_core.vocabulary.instance import instance_of
from qlm_queue.memory.state import MemoryState, StoredInstance, StoredLease, StoredQueue
from qlm_queue.values import Lease


def acquire(state: MemoryState, now_s: float, role: str, nonce: str, ttl_s: float, address: str) -> Lease | None:
    held = state.holder(role, now_s)
    if held is None:
        state.fences[role] += 1
        held = StoredLease(token=f"{state.fences[role]}:{nonce}", address=address, expires_s=now_s + ttl_s)
        state.leases[role] = held
    return Lease(role=role, token=held.token) if _nonce(held) == nonce else None


def _nonce(lease: StoredLease) -> str:
    return lease.token.partition(":")[2]


def renew(state: MemoryState, now_s: float, lease: Lease, ttl_s: float) -> None:
    state.check(lease, now_s)
    held = state.leases[lease.role]
    state.leases[lease.role] = StoredLease(token=held.token, address=held.address, expires_s=now_s + ttl_s)


def release(state: MemoryState, now_s: float, lease: Lease) -> None:
    held = state.holder(lease.role, now_s)
    if held is not None and held.token == lease.token:
        del state.leases[lease.role]


def register(state: MemoryState, now_s: float, instance: str, nonce: str, body: bytes, ttl_s: float) -> tuple[str, Lease]:
    registered = state.instances.get(instance)
    if registered is not None:
        held = state.holder(registered.incarnation, now_s)
        if held is not None and _nonce(held) == nonce:
            return registered.incarnation, Lease(role=registered.incarnation, token=held.token)
        if held is not None:
            state.leases[registered.incarnation] = replace(held, expires_s=held.expires_s - ttl_s / 2)
    state.fences[instance] += 1
    fence = state.fences[instance]
    incarnation = f"{instance}/{fence}"
    lease = Lease(role=incarnation, token=f"{fence}:{nonce}")
    state.leases[incarnation] = StoredLease(token=lease.token, address="", expires_s=now_s + ttl_s)
    state.instances[instance] = StoredInstance(incarnation=incarnation, body=body)
    state.queues.setdefault(instance, StoredQueue())
    state.running[incarnation] = {}
    return incarnation, lease


def describe(state: MemoryState, now_s: float, lease: Lease, body: bytes) -> None:
    state.check(lease, now_s)
    registered = state.instances.get(instance_of(lease.role))
    if registered is None or registered.incarnation != lease.role:
        raise LeaseLost(f"{lease.role} is not the registered incarnation of its instance")
    registered.body = body


def deregister(state: MemoryState, now_s: float, lease: Lease) -> None:
    state.check(lease, now_s)
    del state.leases[lease.role]
    if not state.running.get(lease.role, {}):
        state.running.pop(lease.role, None)
