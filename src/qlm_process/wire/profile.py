"""Profile snapshots between the wire (estimator.proto) and `qlm_core.profiles.profile`. Both sides name their fields alike."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from google.protobuf.message import DecodeError, Message

from qlm.api.v1 import estimator_pb2
from qlm_core.profiles.calibration import PRIOR_SCORES, CalibratedTime, CalibrationProfile, CalibrationTable
from qlm_core.profiles.hardware_profile import AS_PROFILED, TIMED_OPERATIONS, OperationSlowdown
from qlm_core.profiles.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.statistics.length_model import NO_LENGTH_MODEL
from qlm_process.wire import lengths as length_wire

_HARDWARE = tuple(field.name for field in fields(HardwareProfile) if field.name not in TIMED_OPERATIONS)
_OPERATION = tuple(field.name for field in fields(OperationSlowdown))
_CALIBRATION = tuple(field.name for field in fields(CalibrationProfile) if field.name != "time")
_TIMES = {
    estimator_pb2.PREDICTED_TIME_WAIT: CalibratedTime.WAIT,
    estimator_pb2.PREDICTED_TIME_COMPLETION: CalibratedTime.COMPLETION,
}
TIME_NUMBERS = {time: number for number, time in _TIMES.items()}
_WORKLOAD = tuple(field.name for field in fields(WorkloadProfile))


def to_proto(snapshot: ProfileSnapshot) -> estimator_pb2.ProfileSnapshot:
    return estimator_pb2.ProfileSnapshot(
        version=snapshot.version,
        made_s=snapshot.made_s,
        last_event_id=snapshot.last_event_id,
        hardware=[_hardware_message(row) for row in snapshot.hardware],
        workload=[estimator_pb2.WorkloadProfile(**_values(row, _WORKLOAD)) for row in snapshot.workload],
        calibration=[
            estimator_pb2.CalibrationProfile(time=TIME_NUMBERS[row.time], **_values(row, _CALIBRATION)) for row in snapshot.calibration.rows
        ],
        length_model=length_wire.model_to_proto(snapshot.length_model) if snapshot.length_model != NO_LENGTH_MODEL else None,
    )


def from_proto(message: estimator_pb2.ProfileSnapshot) -> ProfileSnapshot:
    """Raises ValueError for figures that no profile may have."""
    return ProfileSnapshot(
        version=message.version,
        made_s=message.made_s,
        last_event_id=message.last_event_id,
        hardware=tuple(_hardware(row) for row in message.hardware),
        workload=tuple(_workload(row) for row in message.workload),
        calibration=CalibrationTable(
            # A time that a newer version calibrates means nothing here.
            tuple(
                CalibrationProfile(**{**_values(row, _CALIBRATION), "time": _TIMES[row.time], "scores": tuple(row.scores) or PRIOR_SCORES})
                for row in message.calibration
                if row.time in _TIMES
            )
        ),
        length_model=length_wire.model_from_proto(message.length_model),
    )


def to_body(snapshot: ProfileSnapshot) -> bytes:
    """Serializes the body that `publish_profiles` of the queue stores."""
    return to_proto(snapshot).SerializeToString(deterministic=True)


def from_body(body: bytes) -> ProfileSnapshot:
    """Reads what `read_profiles` of the queue returns, if that is not empty. Raises ValueError for what is no snapshot."""
    try:
        message = estimator_pb2.ProfileSnapshot.FromString(body)
    except DecodeError as error:
        raise ValueError("not a ProfileSnapshot message") from error
    return from_proto(message)


def pair_rows_from_body(body: bytes, gpu: str, n_gpu: int) -> tuple[HardwareProfile, ...]:
    """Only the rows of these GPUs that are of no single instance, of what `from_body` reads. Raises ValueError as it does."""
    try:
        message = estimator_pb2.ProfileSnapshot.FromString(body)
    except DecodeError as error:
        raise ValueError("not a ProfileSnapshot message") from error
    return tuple(_hardware(row) for row in message.hardware if (row.gpu, row.n_gpu, row.instance) == (gpu, n_gpu, ""))


def _hardware_message(row: HardwareProfile) -> estimator_pb2.HardwareProfile:
    message = estimator_pb2.HardwareProfile(**_values(row, _HARDWARE))
    for name in TIMED_OPERATIONS:
        operation = getattr(row, name)
        if operation != AS_PROFILED:
            getattr(message, name).CopyFrom(estimator_pb2.OperationSlowdown(**_values(operation, _OPERATION)))
    return message


def _hardware(row: estimator_pb2.HardwareProfile) -> HardwareProfile:
    values = _values(row, _HARDWARE)
    given = {field.name for field, _ in row.ListFields()}
    values |= {name: OperationSlowdown(**_values(getattr(row, name), _OPERATION)) for name in TIMED_OPERATIONS if name in given}
    return HardwareProfile(**values)


def _workload(row: estimator_pb2.WorkloadProfile) -> WorkloadProfile:
    return WorkloadProfile(**{**_values(row, _WORKLOAD), "output_shares": tuple(row.output_shares)})


def _values(
    row: HardwareProfile | OperationSlowdown | WorkloadProfile | CalibrationProfile | Message, names: tuple[str, ...]
) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}
