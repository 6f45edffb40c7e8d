"""The planner's decisions as one machine: `step(now_s, event) -> effects`.

step                the machine
events, effects     what it is told, what it asks of the shell
connection          when failed calls to the queue are repeated
"""
