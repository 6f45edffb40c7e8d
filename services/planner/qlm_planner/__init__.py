"""The planner: groups requests, orders the groups on virtual queues, and moves them as instances and profiles change.

A room imports only those below it:

    shell        the process: leadership, gRPC, calls on the queue, the solver's process, metrics
    machine      events in, effects out: steps all rooms below
    overload     advice on the fleet, shedding
    plan         when the plan changes, by whose order, and how the queue gets it
    groups       requests into groups, and groups to their first place
    policies     comparison policies
    cost         the cost of orders on the board
    board        groups, virtual queues and instances; counts only

`search` finds better orders, `exact` proves the best of few groups: arrays alone, no board. `policy` has what an operator may change in
the decisions, `config` the settings of the process.
"""
