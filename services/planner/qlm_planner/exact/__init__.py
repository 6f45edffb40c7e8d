"""The exact solver: the paper's stochastic program (QLM section 7, equations 6-13; corrected) as a mixed-integer program in Pyomo, for
small queues, as reference and option. Needs the extra `planner`.

    program       the program: variables, constraints, objective
    backends      HiGHS and GLPK
    solver        solves a problem to proven orders, or raises an error
"""
