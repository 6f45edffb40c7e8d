"""The operations that can be turned on, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qlm_core.operations.batch_limit import BatchLimit
from qlm_core.operations.operation import Operation

OPERATIONS: Mapping[str, Operation] = {each.name: each for each in (BatchLimit(),)}


def operations_of(names: Sequence[str]) -> tuple[Operation, ...]:
    """Those of these names, in their order. Raises ValueError for an unknown one."""
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise ValueError(f"unknown operations {', '.join(unknown)}; may be {', '.join(OPERATIONS)}")
    return tuple(OPERATIONS[name] for name in dict.fromkeys(names))
