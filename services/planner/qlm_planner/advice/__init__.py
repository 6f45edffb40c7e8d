"""Advice: which requests will miss their SLOs, how many more instances of which GPU would meet them, and how many are idle (QLM A.3, a).

`demand` measures arrivals, `question` makes one problem of the solver from board and demand, `advising` looks for the smallest fleet whose
orders are enough. All pure; `watch` does it beside the planner's decisions (see docs/adr/0017).
"""
