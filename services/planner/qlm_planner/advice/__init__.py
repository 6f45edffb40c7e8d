"""Advice: which requests will miss their SLOs, how many more instances of which GPU would meet them, and how many are idle (QLM A.3, a).

`demand` measures what comes, `question` takes a picture of board and demand, `forecast` plays it forward on a fleet, `advising` looks for
the smallest fleet that is enough. All pure; `watch` does it beside the planner's decisions (see docs/adr/0017).
"""
