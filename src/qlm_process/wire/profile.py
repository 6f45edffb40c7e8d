"""Profile snapshots between the wire (estimator.proto) and `qlm_core.profiles.profile`. Both sides name their fields alike."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from qlm.api.v1 import estimator_pb2
from qlm.field_copies import message_of, value_of
from qlm_core.profiles.calibration import PRIOR_SCORES, CalibratedTime, CalibrationProfile, CalibrationTable
from qlm_core.profiles.hardware_profile import AS_PROFILED, TIMED_OPERATIONS, OperationSlowdown
from qlm_core.profiles.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.statistics.length_model import NO_LENGTH_MODEL
from qlm_process.wire import lengths as length_wire

_TIMES = {
    estimator_pb2.PREDICTED_TIME_WAIT: CalibratedTime.WAIT,
    estimator_pb2.PREDICTED_TIME_COMPLETION: CalibratedTime.COMPLETION,
}
TIME_NUMBERS = {time: number for number, time in _TIMES.items()}


def to_proto(snapshot: ProfileSnapshot) -> estimator_pb2.ProfileSnapshot:
    return estimator_pb2.ProfileSnapshot(
        version=snapshot.version,
        made_s=snapshot.made_s,
        last_event_id=snapshot.last_event_id,
        hardware=[_hardware_message(row) for row in snapshot.hardware],
        workload=[message_of(estimator_pb2.WorkloadProfile, row) for row in snapshot.workload],
        calibration=[message_of(estimator_pb2.CalibrationProfile, row, time=TIME_NUMBERS[row.time]) for row in snapshot.calibration.rows],
        length_model=length_wire.model_to_proto(snapshot.length_model) if snapshot.length_model != NO_LENGTH_MODEL else None,
    )


def from_proto(message: estimator_pb2.ProfileSnapshot) -> ProfileSnapshot:
    """Raises ValueError for figures that no profile may have."""
    return ProfileSnapshot(
        version=message.version,
        made_s=message.made_s,
        last_event_id=message.last_event_id,
        hardware=tuple(_hardware(row) for row in message.hardware),
        workload=tuple(value_of(WorkloadProfile, row, uncached_share=row.uncached_share or 1.0) for row in message.workload),
        calibration=CalibrationTable(
            # A time that a newer version calibrates means nothing here.
            tuple(
                value_of(CalibrationProfile, row, time=_TIMES[row.time], scores=tuple(row.scores) or PRIOR_SCORES)
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
    return from_proto(_parsed(body))


def pair_rows_from_body(body: bytes, gpu: str, n_gpu: int) -> tuple[HardwareProfile, ...]:
    """Only the rows of these GPUs that are of no single instance, of what `from_body` reads. Raises ValueError as it does."""
    return tuple(_hardware(row) for row in _parsed(body).hardware if (row.gpu, row.n_gpu, row.instance) == (gpu, n_gpu, ""))


def _parsed(body: bytes) -> estimator_pb2.ProfileSnapshot:
    try:
        return estimator_pb2.ProfileSnapshot.FromString(body)
    except DecodeError as error:
        raise ValueError("not a ProfileSnapshot message") from error


def _hardware_message(row: HardwareProfile) -> estimator_pb2.HardwareProfile:
    operations = {name: getattr(row, name) for name in TIMED_OPERATIONS}
    measured = {name: message_of(estimator_pb2.OperationSlowdown, each) for name, each in operations.items() if each != AS_PROFILED}
    return message_of(estimator_pb2.HardwareProfile, row, **{**dict.fromkeys(TIMED_OPERATIONS), **measured})


def _hardware(row: estimator_pb2.HardwareProfile) -> HardwareProfile:
    given = {field.name for field, _ in row.ListFields()}
    operations = {name: value_of(OperationSlowdown, getattr(row, name)) if name in given else AS_PROFILED for name in TIMED_OPERATIONS}
    return value_of(HardwareProfile, row, **operations)
