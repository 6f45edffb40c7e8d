"""Devices and the links between them, checked at load: docs/reference/deploy.md is the format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from qlm_core.profiles.hardware_prior import GpuFacts, gpu_facts
from qlm_core.vocabulary.errors import ConfigError

DEVICES_MAX = 64
LINK_CLASSES: Mapping[str, tuple[float, float]] = {
    "PIX": (12.0, 7.6),
    "PXB": (12.0, 7.6),
    "PHB": (10.0, 7.6),
    "NODE": (10.0, 7.6),
    "SYS": (8.3, 7.6),
    "NET": (12.0, 9.3),
}
"""Class of `nvidia-smi topo -m` -> GB/s and microseconds of one transfer, by NCCL's own model (NVIDIA/nccl, src/graph/topo.h, tuning.cc):
PCIe 3 x16 of 12 GB/s, less a sixth through an Intel CPU, 10 less a sixth between sockets; base latency of a ring 6.6 with 1.0 for a PCIe
hop and 2.7 for a network's. NCCL gives all PCIe classes one latency. NET is not a class of `nvidia-smi`: a link between hosts."""
NVLINK_GB_S = 20.0
NVLINK_US = 7.2
"""One NVLink of `NV#` (SM80 in topo.h), and its latency: base 6.6 and 0.6 for the hop."""
NVLINK = re.compile(r"NV([1-9]\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or a host's CPU. `card`: its data sheet. `speed_share`: of what the card would reach, such as under a power limit.
    `token_ms`: measured time of one token through all layers of a model, by the model's name; it replaces the data sheet. `index`: in
    CUDA_VISIBLE_DEVICES, None where it is not known."""

    name: str
    gpu: str
    memory_gib: float
    card: GpuFacts | None
    speed_share: float = 1.0
    token_ms: Mapping[str, float] = field(default_factory=dict)
    index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A pair of devices that exchange activations directly, in both directions alike."""

    first: str
    second: str
    bandwidth_gb_s: float
    latency_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    devices: tuple[Device, ...]
    links: tuple[Link, ...]


def parse_topology(document: object) -> Topology:
    """Raises ConfigError that names the device or the link, the field and the rule."""
    root = _fields(document, "topology", {"devices", "links", "default_link"})
    entries = _entries(root.get("devices"), "devices")
    if not 1 <= len(entries) <= DEVICES_MAX:
        raise ConfigError(f"topology: devices: must be 1 to {DEVICES_MAX}, not {len(entries)}")
    devices = tuple(_device(entry, position) for position, entry in enumerate(entries))
    names = [device.name for device in devices]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"device {twice}: name: must be given once")
    found: dict[frozenset[str], Link] = {}
    for entry in _entries(root.get("links", []), "links"):
        link = _link(entry, names)
        pair = frozenset((link.first, link.second))
        if pair in found:
            raise ConfigError(f"link {link.first} - {link.second}: between: must be given once")
        found[pair] = link
    if (default := root.get("default_link")) is not None:
        bandwidth_gb_s, latency_us = link_class(default, "topology: default_link")
        for place, first in enumerate(names):
            for second in names[place + 1 :]:
                rest = Link(first=first, second=second, bandwidth_gb_s=bandwidth_gb_s, latency_us=latency_us)
                found.setdefault(frozenset((first, second)), rest)
    linked = {name for pair in found for name in pair}
    if len(names) > 1 and (alone := next((name for name in names if name not in linked), None)):
        raise ConfigError(f"device {alone}: links: must have a path to another device (give a link, or default_link)")
    return Topology(devices=devices, links=tuple(found.values()))


def link_class(name: object, where: str) -> tuple[float, float]:
    """GB/s and microseconds of a class. Raises ConfigError."""
    text = str(name)
    if text in LINK_CLASSES:
        return LINK_CLASSES[text]
    if match := NVLINK.fullmatch(text):
        return NVLINK_GB_S * int(match[1]), NVLINK_US
    raise ConfigError(f"{where}: must be one of {', '.join(LINK_CLASSES)} or NV# with a number, not {text!r}")


def _device(entry: object, position: int) -> Device:
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigError(f"devices: entry {position + 1}: name: must be a text")
    where = f"device {name}"
    known = {"name", "gpu", "memory_gib", "bandwidth_gb_s", "tflops", "power_limit_w", "power_max_w", "speed_share", "token_ms", "index"}
    row = _fields(entry, where, known)
    memory_gib = _positive(row.get("memory_gib"), f"{where}: memory_gib")
    gpu = str(row.get("gpu", ""))
    card = gpu_facts().get(gpu)
    if {"bandwidth_gb_s", "tflops"} & row.keys():
        card = GpuFacts(
            memory_gb=memory_gib,
            bandwidth_gb_s=_positive(row.get("bandwidth_gb_s"), f"{where}: bandwidth_gb_s"),
            tflops=_positive(row.get("tflops"), f"{where}: tflops"),
            host_gb_s=1.0,
        )
    token_ms = row.get("token_ms", {})
    if not isinstance(token_ms, dict):
        raise ConfigError(f"{where}: token_ms: must be a mapping of models to milliseconds")
    if card is None and not token_ms:
        raise ConfigError(f"{where}: gpu: must be one of {', '.join(gpu_facts())}, or give bandwidth_gb_s and tflops, or token_ms")
    index = row.get("index")
    if index is not None and (not isinstance(index, int) or isinstance(index, bool) or index < 0):
        raise ConfigError(f"{where}: index: must be a whole number >= 0, not {index!r}")
    return Device(
        name=name,
        gpu=gpu,
        memory_gib=memory_gib,
        card=card,
        speed_share=_speed_share(row, where),
        token_ms={str(model): _positive(value, f"{where}: token_ms: {model}") for model, value in token_ms.items()},
        index=index,
    )


def _speed_share(row: Mapping[str, object], where: str) -> float:
    """`speed_share` as given, else the cube root of the power limit's share: dynamic power is C V^2 f, and V falls with f. An estimate for
    want of a measurement: a decode that waits for memory loses less at first, and more near the lowest limit."""
    if "speed_share" in row:
        share = _positive(row["speed_share"], f"{where}: speed_share")
    elif "power_limit_w" in row or "power_max_w" in row:
        limit_w = _positive(row.get("power_limit_w"), f"{where}: power_limit_w")
        share = math.cbrt(limit_w / _positive(row.get("power_max_w"), f"{where}: power_max_w"))
    else:
        return 1.0
    if share > 1.0:
        raise ConfigError(f"{where}: speed_share, or power_limit_w / power_max_w: must be at most 1, not {share:g}")
    return share


def _link(entry: object, names: list[str]) -> Link:
    row = _fields(entry, "links", {"between", "class", "bandwidth_gb_s", "latency_us"})
    pair = row.get("between")
    if not (isinstance(pair, list) and len(pair) == 2 and pair[0] != pair[1]):
        raise ConfigError(f"links: between: must be two devices, not {pair!r}")
    first, second = (str(name) for name in pair)
    where = f"link {first} - {second}"
    if unknown := next((name for name in (first, second) if name not in names), None):
        raise ConfigError(f"{where}: between: must name devices of this file, not {unknown!r}")
    given = {name: _positive(row[name], f"{where}: {name}") for name in ("bandwidth_gb_s", "latency_us") if name in row}
    if "class" in row:
        bandwidth_gb_s, latency_us = link_class(row["class"], f"{where}: class")
        given = {"bandwidth_gb_s": bandwidth_gb_s, "latency_us": latency_us, **given}
    if len(given) != 2:
        raise ConfigError(f"{where}: must have a class, or bandwidth_gb_s and latency_us")
    return Link(first=first, second=second, **given)


def _entries(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise ConfigError(f"topology: {where}: must be a list")
    return value


def _fields(value: object, where: str, known: set[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a mapping")
    if unknown := sorted(str(name) for name in value if name not in known):
        raise ConfigError(f"{where}: {unknown[0]}: must be one of {', '.join(sorted(known))}")
    return value


def _positive(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{where}: must be a finite number > 0, not {value!r}")
    return float(value)
