"""`bench agent`: what a real engine does under QLM's agent, against the same engine by itself.

command, figures, parts    the command; its figures; which part measures what
stepped_engine             a vLLM engine that the bench steps itself
urgent, kv_swap            parts: first tokens of urgent requests in a full batch; KV swap against recomputation by context
"""
