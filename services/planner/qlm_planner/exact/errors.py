"""Why there is no exact answer. Whoever asked falls back on the scalable solver, and says so.

QlmError
`- ExactError
   |- SolverMissing    Pyomo or the solver is not installed
   |- SolverFailed     it ended without an answer
   |- NoOrders         the time was up before it had any orders, or there are none
   `- TooLarge         more groups or variables than it is worth a try
"""

from __future__ import annotations

from qlm_core.errors import QlmError


class ExactError(QlmError):
    """There is no exact answer."""


class SolverMissing(ExactError):
    """Pyomo or the solver is not installed."""


class SolverFailed(ExactError):
    """The solver ended without an answer."""


class NoOrders(ExactError):
    """The time was up before the solver had any orders, or none keep what was asked as a hard constraint."""


class TooLarge(ExactError):
    """More groups or variables than it is worth a try."""
