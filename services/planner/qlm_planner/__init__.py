"""The planner: groups requests, orders the groups on virtual queues, and moves them as instances and profiles change.

Pure, from what is known to what is decided (`machine.py` steps them all):

    policy, snapshot, events, effects   settings, what is read, what the machine is told, what it wants
    group_meta, board                   groups, virtual queues and instances; counts only
    tenants, classing                   which class a request is of: its tenant, mega prompts
    shares, ranks                       who has had too much, who has waited too long; who therefore comes last or first
    estimates, class_terms              what is known of a class on an instance; what groups cost there, all at once
    order_cost, queues, judging         what orders cost; the queues as they are; what whole plans cost
    insertion, problems, solving        a place for one new group; the board as the solver's problem; the solver's jobs and answers
    solver, exact                       whole orders, from arrays alone
    grouping, reshape, reshaping        requests into groups; changes of the plan; when it is changed
    intake, history, connection, upkeep requests on the way; events and overviews in one order; failures; what is done at intervals
    refreshing                          overviews that have a page of the groups
    plan_view                           the plan as others see it

The shell: `calls` carries the machine's calls out, `worker` has the solver's process (`worker_main`, `solver_jobs`), `leadership` is one
term as the leader, `shell` waits for the next one, `service` and `watchers` speak gRPC, `metrics`, `config`, `__main__`.
"""
