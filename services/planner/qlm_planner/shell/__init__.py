"""The planner's process: IO around the machine, no decisions.

process              waits for the lease and leads
leadership           one term: the machine, its inbox, its calls
queue_calls          the machine's calls on the queue
rpc, plan_message    the gRPC service; the plan as clients read it
solver_client        the solver's process, seen from the planner
solver_process       that process
warm_up              compiles what it needs, once a machine
solver_requests      answers jobs of the solver
advice_watch         computes advice in the background
metrics, tracing     Prometheus metrics; spans
"""
