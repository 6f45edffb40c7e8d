"""The search for better orders: arrays in, orders out; no board. A seed gives the same orders on every machine.

problem                       groups and queues to plan, their orders, the cost of orders
solver                        evaluate, group_lateness, construct, improve, solve
packing, compile_cache        arrays for compiled code; the compiler and its cache
group_cost, order_state       the cost of a group at its position; orders with their cost at every position
construction                  orders without a search: earliest deadline first; cheapest insertion
annealing, moves              simulated annealing, and its moves
random_numbers                pseudo-random numbers, the same on every machine
"""

from __future__ import annotations

from qlm_planner.search.problem import Costs, Orders, Problem, ProblemError, Solution, Weights

__all__ = ["Costs", "Orders", "Problem", "ProblemError", "Solution", "Weights"]
