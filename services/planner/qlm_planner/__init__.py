"""The planner: groups requests, orders the groups on virtual queues, and moves them as instances and profiles change.

A package imports only those below it:

    shell        the process: leadership, gRPC, calls on the queue, the solver's process, metrics
    machine      events in, effects out: the state machine
    overload     advice on the fleet, shedding
    plan         triggers and changes of the plan, and how they reach the queue
    groups       groups of requests, and their first positions
    policies     comparison policies
    cost         the cost of orders on the board
    board        groups, virtual queues and instances; counts only

`search` finds better orders, `exact` proves the best order of few groups: on arrays alone, without the board. `policy` holds the settings
of the decisions, `config` those of the process.
"""
