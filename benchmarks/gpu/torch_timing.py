"""Times steps, prefills and transfers of a model of real size on this device, with PyTorch alone, and prints them as one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from benchmarks.gpu.decoder import BYTES_OF, SHAPES, Decoder

WARM_UPS = 3
FREE_SHARE = 0.8
"""Share of the device's free memory for weights and KV."""
CHUNK_BYTES = 1 << 30
MOVED_TOKENS = 4_096
SIZES = {
    # batches, contexts, prompts, repetitions
    False: ((1, 8, 32, 64), (256, 1024, 4096), (16, 128, 512, 1024, 2048, 4096), 20),
    True: ((1, 4), (32, 128), (16, 64, 128), 3),
}
"""By kind of run: full or dry."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=("auto", *SHAPES), default="auto", help="auto: Mistral-7B where it fits, else Llama-3.2-1B")
    parser.add_argument("--dtype", choices=tuple(BYTES_OF), default="bfloat16")
    parser.add_argument("--small", action="store_true", help="few sizes and repetitions: the figures mean nothing")
    chosen = parser.parse_args(arguments)
    sys.stdout.write(json.dumps(time_model(chosen.device, chosen.shape, chosen.dtype, small=chosen.small)) + "\n")
    return 0


def time_model(device: str, shape_name: str, dtype: str, *, small: bool) -> dict[str, object]:
    """Figures in the units of the hardware profiles; transfers also in GB/s (10^9 bytes)."""
    free = _free_bytes(device)
    name = shape_name if shape_name != "auto" else _largest(free, dtype)
    shape = SHAPES[name]
    batches, contexts, prompts, repetitions = SIZES[small]
    with torch.inference_mode():
        decoder = Decoder(shape, device, dtype)
        room = FREE_SHARE * free - decoder.weight_bytes
        kv_bytes = shape.kv_bytes_per_token(dtype)
        steps = [
            (batch, context, _step_ms(decoder, batch, context, repetitions))
            for batch in batches
            for context in contexts
            if 2 * batch * context * kv_bytes < room
        ]
        prefills = [(tokens, _prefill_ms(decoder, tokens, repetitions)) for tokens in prompts]
        transfers = _transfers(device, min(CHUNK_BYTES, int(room / 4)), kv_bytes, shape.layers, repetitions)
        if device == "cuda":
            torch.cuda.synchronize()
    a, b, c = fit_line([(1.0, batch, batch * context) for batch, context, _ in steps], [ms for _, _, ms in steps])
    base, linear, squared = fit_line([(1.0, tokens, tokens**2) for tokens, _ in prefills], [ms for _, ms in prefills])
    return {
        "model": name,
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "figures": {
            "decode_a_ms": a,
            "decode_b_ms_per_seq": b,
            "decode_c_ms_per_context_token": c,
            "prefill_base_ms": base,
            "prefill_ms_per_token": linear,
            "prefill_ms_per_token_squared": squared,
            "kv_swap_us_per_token": transfers["kv_us_per_token_out"],
            "load_cpu_to_gpu_s": decoder.weight_bytes / 1e9 / transfers["host_to_device_gb_s"],
            "weights_gb": decoder.weight_bytes / 1e9,
            "kv_bytes_per_token": kv_bytes,
        },
        "transfers": transfers,
        "steps": [{"sequences": batch, "context": context, "ms": ms} for batch, context, ms in steps],
        "prefills": [{"tokens": tokens, "ms": ms} for tokens, ms in prefills],
    }


def _step_ms(decoder: Decoder, batch: int, context: int, repetitions: int) -> float:
    inputs, kv = decoder.inputs(batch, 1), decoder.kv(batch, context)
    return 1e3 * seconds_of(cuda_graph(lambda: decoder.decode(inputs, kv), decoder.device), decoder.device, repetitions)


def _prefill_ms(decoder: Decoder, tokens: int, repetitions: int) -> float:
    inputs = decoder.inputs(1, tokens)
    return 1e3 * seconds_of(lambda: decoder.prefill(inputs), decoder.device, repetitions)


def _transfers(device: str, chunk_bytes: int, kv_bytes_per_token: int, layers: int, repetitions: int) -> dict[str, float]:
    """Weights as one long copy from pinned memory; KV of MOVED_TOKENS in a piece for each layer's keys and values, as engines keep it."""
    pinned = device == "cuda"
    host = torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
    inwards = seconds_of(lambda: there.copy_(host, non_blocking=True), device, repetitions)
    outwards = seconds_of(lambda: host.copy_(there, non_blocking=True), device, repetitions)
    piece = min(MOVED_TOKENS * kv_bytes_per_token, chunk_bytes) // (2 * layers)
    pieces = [slice(number * piece, (number + 1) * piece) for number in range(2 * layers)]
    tokens = piece * 2 * layers / kv_bytes_per_token

    def kv_out() -> None:
        for part in pieces:
            host[part].copy_(there[part], non_blocking=True)

    def kv_in() -> None:
        for part in pieces:
            there[part].copy_(host[part], non_blocking=True)

    return {
        "host_to_device_gb_s": chunk_bytes / inwards / 1e9,
        "device_to_host_gb_s": chunk_bytes / outwards / 1e9,
        "kv_us_per_token_out": 1e6 * seconds_of(kv_out, device, repetitions) / tokens,
        "kv_us_per_token_in": 1e6 * seconds_of(kv_in, device, repetitions) / tokens,
    }


def _largest(free: int, dtype: str) -> str:
    """The first whose weights leave as much again."""
    return next((name for name in ("Mistral-7B", "Llama-3.2-1B") if 2 * SHAPES[name].parameters * BYTES_OF[dtype] < free), "tiny")


def _free_bytes(device: str) -> int:
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else 2 << 30


# Times of work on a device, and a line through them --------------------------------------------------------------------


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
