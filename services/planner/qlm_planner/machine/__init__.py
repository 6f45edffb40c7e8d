"""The planner's decisions as one state machine: `step(now_s, event) -> effects`.

step                the machine
events, effects     its inputs; its calls and reports
connection          retries of failed calls to the queue
"""
