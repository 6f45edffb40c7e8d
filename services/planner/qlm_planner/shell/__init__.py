"""The planner's process: IO around the machine, no decisions.

process              waits for the lease, leads, waits again
leadership           one term: the machine, its inbox, its calls
queue_calls          the machine's calls on the queue
rpc                  the gRPC service, and those who watch the plan
solver_client        the solver's process as the planner holds it
solver_process       that process
solver_requests      jobs and questions from asking to answer
advice_watch         advice worked out beside the decisions
metrics, tracing     Prometheus metrics; spans
"""
