"""The whole cluster in virtual time: the machines of all services over the queue's memory twin, with faults by seed.

Nothing waits for real time and only the seed is random: a run is a function of its arguments, in every process.

- `simulate` runs a workload over a described cluster under a policy of the planner, without faults, and reports each request's outcome.
- `seed_run.run_seed` runs a small cluster through a storm of faults and checks the design's invariants after every command.
"""

from qlm_sim.comparison import RequestOutcome, SimulationResult, simulate
from qlm_sim.description import ClusterDescription, InstanceDescription
from qlm_sim.requests import SimRequest

__all__ = [
    "ClusterDescription",
    "InstanceDescription",
    "RequestOutcome",
    "SimRequest",
    "SimulationResult",
    "simulate",
]
