"""Profile snapshots between the wire (estimator.proto) and `qlm_core.profile`. Both sides name their fields alike."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from google.protobuf.message import DecodeError, Message

from qlm.api.v1 import estimator_pb2
from qlm_core.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile

_HARDWARE = tuple(field.name for field in fields(HardwareProfile))
_WORKLOAD = tuple(field.name for field in fields(WorkloadProfile))


def to_proto(snapshot: ProfileSnapshot) -> estimator_pb2.ProfileSnapshot:
    return estimator_pb2.ProfileSnapshot(
        version=snapshot.version,
        made_s=snapshot.made_s,
        hardware=[estimator_pb2.HardwareProfile(**_values(row, _HARDWARE)) for row in snapshot.hardware],
        workload=[estimator_pb2.WorkloadProfile(**_values(row, _WORKLOAD)) for row in snapshot.workload],
    )


def from_proto(message: estimator_pb2.ProfileSnapshot) -> ProfileSnapshot:
    """Raises ValueError for figures that no profile may have."""
    return ProfileSnapshot(
        version=message.version,
        made_s=message.made_s,
        hardware=tuple(HardwareProfile(**_values(row, _HARDWARE)) for row in message.hardware),
        workload=tuple(WorkloadProfile(**_values(row, _WORKLOAD)) for row in message.workload),
    )


def to_body(snapshot: ProfileSnapshot) -> bytes:
    """What `publish_profiles` of the queue stores."""
    return to_proto(snapshot).SerializeToString(deterministic=True)


def from_body(body: bytes) -> ProfileSnapshot:
    """Reads what `read_profiles` of the queue returns, if that is not empty. Raises ValueError for what is no snapshot."""
    try:
        message = estimator_pb2.ProfileSnapshot.FromString(body)
    except DecodeError as error:
        raise ValueError("not a ProfileSnapshot message") from error
    return from_proto(message)


def _values(row: HardwareProfile | WorkloadProfile | Message, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}
