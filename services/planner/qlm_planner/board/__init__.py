"""The board: groups, virtual queues and instances as the planner knows them, kept up to date by events and overviews.

board, group, slot            groups on queues, instances with the requests that they run; counts only
snapshot                      an overview of the queue
history, partial_overview     merges lifecycle events and overviews; overviews that hold a page of the groups
arrivals                      requests that wait for a group
sweeps                        periodic calls: reclaim, expire, forget
tenants, tenant_shares        weights and limits of tenants; their shares of the served work
"""
