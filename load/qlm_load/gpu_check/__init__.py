"""What QLM says of GPUs, checked on one: `load/gpu_check.sh`, or `python -m qlm_load.gpu_check`.

The modules that time PyTorch (`host`, `decoder`, `stopwatch`, `torch_timing`) need nothing but PyTorch; those that drive the checks
(`__main__`, `checks`, `summary`) need nothing at all. What needs more says so, and its check is skipped without it.
"""
