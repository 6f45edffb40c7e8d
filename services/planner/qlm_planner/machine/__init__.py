"""The planner's decisions as one machine: `step(now_s, event) -> effects`.

step                the machine
events, effects     its inputs; calls and reports for the shell
connection          when failed calls to the queue are repeated
"""
