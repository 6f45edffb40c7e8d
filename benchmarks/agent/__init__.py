"""`benchmarks agent`: a real engine under QLM's agent, against the same engine alone.

command, figures, parts          the command; its figures; the parts and their modules
stepped_engine, bare_engine      a vLLM engine that the bench steps itself; one alone in a process, with all requests at once
port_runs                        runs on an engine behind the agent's port
own_agent, model_config          a whole agent on a queue that the bench writes; the settings of agents and engines
intervals                        a ratio from pairs, with its interval
throughput                       part: tokens a second of an agent that pulls, over vLLM alone
urgent, kv_swap                  parts: first tokens of urgent requests in a full batch; KV swap against recomputation by context
resuming                         part: answers of evicted requests that continue on any instance, against undisturbed ones
model_swap                       part: model swaps by tier, and warmings hidden behind the running batch
waiting                          part: predicted waits of a whole cluster against real ones
"""
