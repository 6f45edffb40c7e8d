"""QLM's figures of GPUs, checked on one: `benchmarks/gpu_check.sh`, or `python -m benchmarks.gpu`.

The modules that time PyTorch (`host`, `decoder`, `torch_timing`) need nothing but PyTorch; those that drive the checks
(`__main__`, `checks`, `summary`) need nothing at all. A check with further needs is skipped without them.
"""
