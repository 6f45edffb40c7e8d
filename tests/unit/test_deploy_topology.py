"""Topology files: refusals and their words; and the output of `nvidia-smi` on a host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlm_cli.deploy.command import topology_of_output
from qlm_core.vocabulary.errors import ConfigError
from qlm_deploy.probe import topology_of_cpu, topology_of_gpus
from qlm_deploy.topology import DEVICES_MAX, parse_topology

SAMPLES = Path(__file__).parent / "deploy_samples"


def device(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "gpu": "RTX-3090", "memory_gib": 24, **fields}


def pair(**fields: Any) -> dict[str, Any]:
    return {"devices": [device("a"), device("b")], "links": [{"between": ["a", "b"], **(fields or {"class": "PIX"})}]}


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ([], "topology: must be a mapping"),
        ({"devices": []}, "topology: devices: must be 1 to 64, not 0"),
        ({"devices": [device(f"d{n}") for n in range(DEVICES_MAX + 1)]}, "topology: devices: must be 1 to 64, not 65"),
        ({"devices": [{"gpu": "L4"}]}, "devices: entry 1: name: must be a text"),
        ({"devices": [device("a"), device("a")], "default_link": "PIX"}, "device a: name: must be given once"),
        ({"devices": [device("a", memory_gib=0)]}, "device a: memory_gib: must be a finite number > 0, not 0"),
        ({"devices": [device("a", memory_gib=True)]}, "device a: memory_gib: must be a finite number > 0, not True"),
        ({"devices": [device("a", gpu="RTX-9000")]}, "device a: gpu: must be one of T4, "),
        ({"devices": [device("a", bandwidth_gb_s=0, tflops=1)]}, "device a: bandwidth_gb_s: must be a finite number > 0, not 0"),
        ({"devices": [device("a", watts=300)]}, "device a: watts: must be one of "),
        ({"devices": [device("a", power_limit_w=300)]}, "device a: power_max_w: must be a finite number > 0, not None"),
        ({"devices": [device("a", power_limit_w=400, power_max_w=350)]}, "device a: speed_share, or power_limit_w"),
        ({"devices": [device("a", token_ms=[1])]}, "device a: token_ms: must be a mapping"),
        ({"devices": [device("a", token_ms={"m": -1})]}, "device a: token_ms: m: must be a finite number > 0, not -1"),
        ({"devices": [device("a", index=-1)]}, "device a: index: must be a whole number >= 0, not -1"),
        ({"devices": [device("a"), device("b")]}, "device a: links: must have a path to another device"),
        (
            {"devices": [device("a"), device("b"), device("c")], "links": [{"between": ["a", "b"], "class": "PIX"}]},
            "device c: links: must have a path to another device",
        ),
        (pair(bandwidth_gb_s=0, latency_us=5), "link a - b: bandwidth_gb_s: must be a finite number > 0, not 0"),
        (pair(bandwidth_gb_s=5), "link a - b: must have a class, or bandwidth_gb_s and latency_us"),
        (pair(**{"class": "NV0"}), "link a - b: class: must be one of PIX, "),
        ({**pair(), "links": [{"between": ["a", "z"], "class": "PIX"}]}, "link a - z: between: must name devices of this file, not 'z'"),
        ({**pair(), "links": [{"between": ["a", "a"], "class": "PIX"}]}, "links: between: must be two devices"),
        ({**pair(), "links": pair()["links"] * 2}, "link a - b: between: must be given once"),
        ({**pair(), "default_link": "FAST"}, "topology: default_link: must be one of PIX, "),
    ],
)
def test_a_damaged_topology_is_refused_by_name_field_and_rule(document: object, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        parse_topology(document)


def test_links_take_their_class_unless_the_file_measured_them() -> None:
    (link,) = parse_topology(pair()).links
    assert (link.bandwidth_gb_s, link.latency_us) == (12.0, 7.6)
    (link,) = parse_topology(pair(**{"class": "NV4", "latency_us": 3})).links
    assert (link.bandwidth_gb_s, link.latency_us) == (80.0, 3.0)
    three = {"devices": [device("a"), device("b"), device("c")], "default_link": "SYS", "links": [{"between": ["b", "a"], "class": "PIX"}]}
    links = {frozenset((link.first, link.second)): link.bandwidth_gb_s for link in parse_topology(three).links}
    assert links == {frozenset("ab"): 12.0, frozenset("ac"): 8.3, frozenset("bc"): 8.3}


def test_a_power_limit_slows_by_its_cube_root() -> None:
    (found,) = parse_topology({"devices": [device("a", power_limit_w=175, power_max_w=350)]}).devices
    assert found.speed_share == pytest.approx(0.7937, abs=1e-4)


@pytest.mark.parametrize(
    ("sample", "gpus", "pairs"),
    [
        ("unlike-pair.txt", ["RTX-3090", "RTX-4090"], {"PHB": 1}),
        ("eight-a100.txt", ["A100-80GB"] * 8, {"NV12": 28}),
        ("older-driver.txt", ["Tesla V100-SXM2-16GB"] * 4, {"PIX": 1, "PHB": 2, "SYS": 3}),
    ],
)
def test_samples_of_nvidia_smi_are_read(sample: str, gpus: list[str], pairs: dict[str, int]) -> None:
    document: Any = topology_of_output((SAMPLES / sample).read_text())
    assert [row["gpu"] for row in document["devices"]] == gpus
    assert [row["index"] for row in document["devices"]] == list(range(len(gpus)))
    classes = [link["class"] for link in document["links"]]
    assert {kind: classes.count(kind) for kind in set(classes)} == pairs
    assert yaml.safe_load(yaml.safe_dump(document)) == document


def test_the_memory_of_a_gpu_is_in_gib_and_its_topology_loads() -> None:
    document: Any = topology_of_output((SAMPLES / "unlike-pair.txt").read_text())
    assert [row["memory_gib"] for row in document["devices"]] == [24.0, 23.99]
    assert [found.name for found in parse_topology(document).devices] == ["GPU0", "GPU1"]


def test_one_gpu_needs_no_matrix_and_a_cpu_is_one_device() -> None:
    one = topology_of_gpus("name, memory.total [MiB]\nTesla T4, 15360 MiB\n", "", lambda name: "T4")
    assert one == {"devices": [{"name": "GPU0", "gpu": "T4", "memory_gib": 15.0, "index": 0}]}
    assert parse_topology(topology_of_cpu(23.5)).devices[0].gpu == "CPU"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "must begin with: name, memory.total"),
        ("name, memory.total [MiB]\n", "the list must have a GPU"),
        ("name, memory.total [MiB]\nTesla T4, [N/A]\n", "a GPU must be NAME, MEMORY MiB"),
        ("name, memory.total [MiB]\nTesla T4, 15360 MiB\nTesla T4, 15360 MiB\n", "a column for each of 2 GPUs, not 0"),
        ("name, memory.total [MiB]\nT, 1 MiB\nT, 1 MiB\n\tGPU0\tGPU1\nGPU0\t X \tPIX\n", "a row for GPU1 with 2 links"),
        ("name, memory.total [MiB]\nT, 1 MiB\nT, 1 MiB\n\tGPU0\tGPU1\nGPU0\t X \tWAT\nGPU1\tWAT\t X \n", "GPU0 - GPU1: must be one of PIX"),
    ],
)
def test_other_output_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        topology_of_output(text)
