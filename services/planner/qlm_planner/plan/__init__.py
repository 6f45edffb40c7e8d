"""The plan: when it changes, by whose order, and how the queue gets it.

changes           triggers, and the change under way
relocation        groups without a home, groups that were evicted
solver_jobs       questions to the solver, and whether its answers are worth a change
solver_problem    the board as a problem, and orders as queues of the board as it is by then
chunks            a change in bounded compare-and-set chunks
plan_view         the plan as others see it
"""
