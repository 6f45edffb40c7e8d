"""The extension point for LLM serving operations (LSOs) beyond pull, evict, KV swap, model swap and load balance (QLM A.3, docs/adr/0018).

An operation says when it applies, what it does to the terms that orders are worked out from, and what the agent does. Planner and agent
ask the same object: the planner (`operation.effect_of`) as it works out the service of a class, the agent (`operation.limits_of`) as it
looks at its head and its runs. A new one is a module here and a line in `table`; it is turned on by its name (`planner.operations`,
`agent.operations`).
"""
