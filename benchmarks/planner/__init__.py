"""`benchmarks planner`: how good and how fast the planner's answers are.

command, figures, parts    the command; its figures; which part measures what
generator, snapshots       problems by a seed; problems from the arrivals of traces
exactness, gaps, rivals    parts: hits of proven optima; the gap to a long search; late requests against EDF and the paper's objective
"""
