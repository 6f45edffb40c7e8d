"""`benchmarks agent`: a real engine under QLM's agent, against the same engine alone.

command, figures, parts          the command with its parts; its figures; how much of each is measured
stepped_engine                   a vLLM engine that the bench steps itself
own_agent, model_config          a whole agent on a queue that the bench writes; the settings of agents and engines
measured_cluster                 a cluster on vLLM with a row measured as it serves
throughput                       part: tokens a second of an agent that pulls, over vLLM alone
urgent, kv_swap                  parts: first tokens of urgent requests in a full batch; KV swap against recomputation by context
resuming                         part: answers of evicted requests that continue on any instance, against undisturbed ones
model_swap                       part: model swaps by tier, and warmings hidden behind the running batch
waiting, simulating              parts: predicted waits of a whole cluster, and the simulator, against real ones
engine_policies                  part: the order of engine policies, real against simulated
"""
