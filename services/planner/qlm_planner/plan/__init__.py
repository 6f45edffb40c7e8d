"""The plan: when it changes, which rule decides, and how the changes reach the queue.

changes           triggers, and the change under way
relocation        new queues for groups that cannot stay, new positions for evicted groups
solver_jobs       jobs of the solver, and the value of its answers
solver_problem    converts the board to a problem, and orders to queues of the board as it is then
chunks            writes a change in bounded compare-and-set chunks
waits             the waits that the planner publishes
"""
