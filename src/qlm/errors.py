"""The error tree of QLM, as the SDK raises it (see `qlm_core.vocabulary.errors`)."""

from __future__ import annotations

from qlm_core.vocabulary.errors import CallDeadlineExceeded as CallDeadlineExceeded
from qlm_core.vocabulary.errors import ConfigError as ConfigError
from qlm_core.vocabulary.errors import GatewayFull as GatewayFull
from qlm_core.vocabulary.errors import InternalError as InternalError
from qlm_core.vocabulary.errors import InvalidRequest as InvalidRequest
from qlm_core.vocabulary.errors import LeaseLost as LeaseLost
from qlm_core.vocabulary.errors import NotFound as NotFound
from qlm_core.vocabulary.errors import OffsetOutOfRange as OffsetOutOfRange
from qlm_core.vocabulary.errors import PermissionDenied as PermissionDenied
from qlm_core.vocabulary.errors import PreconditionFailed as PreconditionFailed
from qlm_core.vocabulary.errors import QlmError as QlmError
from qlm_core.vocabulary.errors import QueueFull as QueueFull
from qlm_core.vocabulary.errors import RequestEnded as RequestEnded
from qlm_core.vocabulary.errors import RequestIdConflict as RequestIdConflict
from qlm_core.vocabulary.errors import Unauthenticated as Unauthenticated
from qlm_core.vocabulary.errors import Unavailable as Unavailable
