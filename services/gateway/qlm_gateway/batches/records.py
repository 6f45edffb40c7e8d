"""Files and batches as they are stored, and as the OpenAI API shows them."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

WINDOWS_S = {"15m": 900.0, "1h": 3_600.0, "24h": 86_400.0}
"""Completion windows: the SLO of a whole batch, in seconds."""
METADATA_MAX, METADATA_KEY_MAX, METADATA_VALUE_MAX = 16, 64, 512


class BatchState(StrEnum):
    """VALIDATING until the whole file was read, IN_PROGRESS until each line has an answer; the others as the API names them."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


TERMINAL = frozenset({BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED})


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class FileRecord(_Record):
    """`created_s`, `expires_s`: since the epoch; the latter None for one that stays."""

    id: str
    tenant: str
    filename: str
    purpose: str
    size: int
    created_s: float
    expires_s: float | None = None

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": int(self.created_s),
            "expires_at": None if self.expires_s is None else int(self.expires_s),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class LineError(_Record):
    """Why a line is no request. `line`: from 1; None for the file as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(_Record):
    """`times_s`: state -> when the batch entered it. `models`: those that its API key may use; none: all. `keep_output_s`: how long its
    output files stay; None: until they are deleted. The ids of these are chosen when the batch begins, and shown when it has ended."""

    id: str
    tenant: str
    input_file_id: str
    endpoint: str
    window: str
    created_s: float
    state: BatchState = BatchState.VALIDATING
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str = ""
    error_file_id: str = ""
    models: tuple[str, ...] = ()
    errors: tuple[LineError, ...] = ()
    times_s: dict[str, float] = Field(default_factory=dict)
    metadata: dict[str, str] | None = None
    keep_output_s: float | None = None

    @property
    def deadline_s(self) -> float:
        return self.created_s + WINDOWS_S[self.window]

    def moved(self, state: BatchState, now_s: float, **changes: Any) -> BatchRecord:
        """In another state."""
        return self.model_copy(update={"state": state, "times_s": {**self.times_s, state.value: now_s}, **changes})

    def document(self) -> dict[str, Any]:
        def at(state: BatchState) -> int | None:
            time_s = self.times_s.get(state.value)
            return None if time_s is None else math.floor(time_s)

        errors = [each.model_dump() for each in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.state.value,
            "output_file_id": self.output_file_id if self.state in TERMINAL and self.completed else None,
            "error_file_id": self.error_file_id if self.state in TERMINAL and self.failed else None,
            "created_at": int(self.created_s),
            "in_progress_at": at(BatchState.IN_PROGRESS),
            "expires_at": int(self.deadline_s),
            "finalizing_at": at(BatchState.FINALIZING),
            "completed_at": at(BatchState.COMPLETED),
            "failed_at": at(BatchState.FAILED),
            "expired_at": at(BatchState.EXPIRED),
            "cancelling_at": at(BatchState.CANCELLING),
            "cancelled_at": at(BatchState.CANCELLED),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }
