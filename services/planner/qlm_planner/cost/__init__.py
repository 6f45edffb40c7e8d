"""The cost of orders, one for insertion, plans, shedding and advice.

estimates             one snapshot of the profiles: engines, classes of requests, limits of groups
service_times         service times of many groups on instances
order_cost            the objective of orders, on arrays alone
virtual_queues        the queues as input of `order_cost`; the cost of whole plans
absence               the cost of models that are absent from instances
expected_absences     that cost for the current demand
"""
