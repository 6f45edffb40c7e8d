"""The matrix: QLM against every other policy of the planner in cells drawn by a seed, in virtual time."""
