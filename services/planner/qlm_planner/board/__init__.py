"""The board: what the planner knows of groups, virtual queues and instances, and how it keeps that right.

board, group, slot            groups on queues, instances with what they run; counts only
snapshot                      the queue as it is read
history, partial_overview     lifecycle events and overviews in one order; overviews that have a page of the groups
arrivals                      requests on their way into groups
sweeps                        calls at intervals: reclaim, expire, forget
tenants, tenant_shares        weights and limits of tenants; the share of the served work that each has had
"""
