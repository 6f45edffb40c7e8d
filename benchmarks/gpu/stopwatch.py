"""Times of work on a device, and a line through such times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

WARM_UPS = 3


def seconds_of(work: Callable[[], object], device: str, repetitions: int) -> float:
    """The median, the device done with it each time."""
    for _ in range(WARM_UPS):
        work()
    times = []
    for _ in range(repetitions):
        wait_for(device)
        began_s = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - began_s)
    return median(times)


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cuda_graph(work: Callable[[], object], device: str) -> Callable[[], object]:
    """The same as a CUDA graph, as serving engines run decode steps: without the time that launching its kernels takes."""
    if device != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return lambda: graph.replay()


def fit_line(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients of the least squares of relative errors."""
    weights = torch.tensor([1.0 / value for value in values], dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) * weights[:, None]
    found = torch.linalg.lstsq(matrix, torch.ones(len(values), 1, dtype=torch.float64), driver="gelsd").solution
    return [float(value) for value in found[:, 0]]
