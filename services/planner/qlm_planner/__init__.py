"""The planner: groups requests, orders the groups on virtual queues, and moves them as instances and profiles change.

Pure, from what is known to what is decided (`machine.py` steps them all):

    policy, snapshot, events, effects   settings, what is read, what the machine is told, what it wants
    group_meta, board                   groups, virtual queues and instances; counts only
    estimates, timeline                 what a group costs on an instance; what an order costs
    insertion, construct                a place for one new group; a whole order at once
    grouping, reshape, reshaping        requests into groups; changes of the plan; when it is changed
    intake, history, connection, upkeep requests on the way; events and overviews in one order; failures; what is done at intervals
    plan_view                           the plan as others see it

The shell: `calls` carries the machine's calls out, `leadership` is one term as the leader, `shell` waits for the next one, `service` and
`watchers` speak gRPC, `metrics`, `config`, `__main__`.
"""
