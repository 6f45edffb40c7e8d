"""The cost of orders on the board, the same for insertion, plans, shedding and advice.

estimates         one snapshot of the profiles: engines, classes of requests, limits of groups
service_times     what groups take on instances, all at once
order_cost        the objective: what orders cost, on arrays alone
virtual_queues    the queues as they are, as `order_cost` takes them; the cost of whole plans
"""
