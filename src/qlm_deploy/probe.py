"""Topology of a host by what `nvidia-smi` prints: `--query-gpu=name,memory.total --format=csv` and `topo -m`."""

from __future__ import annotations

import re
from collections.abc import Callable

from qlm_core.vocabulary.errors import ConfigError
from qlm_deploy.topology import link_class

GPU = re.compile(r"GPU(\d+)")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MIB_PER = {"MiB": 1.0, "GiB": 1024.0}


def topology_of_gpus(listed: str, matrix: str, known_name: Callable[[str], str]) -> dict[str, object]:
    """A topology file's document. `listed`: the query with its header; `matrix`: `topo -m`, empty for one GPU. `known_name`: of a GPU by
    the driver's. Raises ConfigError for text that is neither."""
    devices = [
        {"name": f"GPU{index}", "gpu": known_name(name), "memory_gib": round(memory_gib, 2), "index": index}
        for index, (name, memory_gib) in enumerate(gpus_listed(listed))
    ]
    links = [{"between": [first, second], "class": kind} for first, second, kind in links_of(matrix, len(devices))]
    return {"devices": devices, **({"links": links} if links else {})}


def topology_of_cpu(memory_gib: float) -> dict[str, object]:
    """A host without GPUs: one device."""
    return {"devices": [{"name": "CPU", "gpu": "CPU", "memory_gib": round(memory_gib, 2)}]}


def gpus_listed(text: str) -> list[tuple[str, float]]:
    """Name and memory in GiB of each row. Raises ConfigError."""
    header, *rows = [line for line in text.splitlines() if line.strip()] or [""]
    if [column.strip().split(" ")[0] for column in header.split(",")] != ["name", "memory.total"]:
        raise ConfigError("nvidia-smi: the list of GPUs must begin with: name, memory.total [MiB]")
    found = []
    for row in rows:
        name, _, memory = (part.strip() for part in row.rpartition(","))
        amount, _, unit = memory.partition(" ")
        if not name or not amount.isdecimal() or unit not in MIB_PER:
            raise ConfigError(f"nvidia-smi: a GPU must be NAME, MEMORY MiB, not {row.strip()[:80]!r}")
        found.append((name, int(amount) * MIB_PER[unit] / 1024.0))
    if not found:
        raise ConfigError("nvidia-smi: the list must have a GPU")
    return found


def links_of(matrix: str, gpus: int) -> list[tuple[str, str, str]]:
    """Pairs of the matrix's upper half with their class; network cards and affinities are left out. Raises ConfigError."""
    lines = [COLOUR.sub("", line).split() for line in matrix.splitlines()]
    header = next((line for line in lines if len(line) > 1 and line[0] == "GPU0" and GPU.fullmatch(line[1])), [])
    columns = [name for name in header if GPU.fullmatch(name)]
    if gpus > 1 and columns != [f"GPU{index}" for index in range(gpus)]:
        raise ConfigError(f"nvidia-smi: topo -m must have a column for each of {gpus} GPUs, not {len(columns)}")
    rows = {line[0]: line[1:] for line in lines if line and line[0] in columns and "X" in line[1:]}
    found = []
    for row, first in enumerate(columns):
        cells = rows.get(first, [])
        if len(cells) < len(columns):
            raise ConfigError(f"nvidia-smi: topo -m must have a row for {first} with {len(columns)} links")
        for column in range(row + 1, len(columns)):
            link_class(cells[column], f"nvidia-smi: topo -m: {first} - {columns[column]}")
            found.append((first, columns[column], cells[column]))
    return found
