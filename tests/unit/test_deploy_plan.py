"""Plans: table 1 of UELLM by the shipped topology, memory, flags, and the commands."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from qlm_agent.config import AgentConfig, served_models
from qlm_cli.deploy.command import read_topology
from qlm_cli.root import root
from qlm_core.profiles.hardware_prior import hardware_prior
from qlm_core.vocabulary.errors import ConfigError
from qlm_deploy.deployers import DEPLOYERS, DeviceMap
from qlm_deploy.map_profile import profile_of_map
from qlm_deploy.plan import describe_map, plan_deployment
from qlm_deploy.stages import demand_of, layer_time_ms
from qlm_deploy.topology import parse_topology
from qlm_process.profile_file import parse_profiles

EXAMPLES = Path(str(files("qlm_deploy"))) / "examples"
MODEL = "ChatGLM2-6B"
TABLE_1 = {16: 11.19, 20: 13.09, 24: 14.85, 28: 17.23, 32: 22.55}
"""Layers on GPU#0, of 33 -> average tokens/s."""


def unlike(*memory_gib: float, **fields: Any) -> Any:
    devices = [{"name": f"d{n}", "gpu": "RTX-3090", "memory_gib": size, **fields} for n, size in enumerate(memory_gib)]
    return parse_topology({"devices": devices, "default_link": "PIX"})


@pytest.mark.parametrize(("first", "tokens_per_s"), TABLE_1.items())
def test_table_1_of_uellm_is_reproduced_within_10_percent(first: int, tokens_per_s: float) -> None:
    demand = demand_of(MODEL, 1024, 8192)
    demand = replace(demand, facts=replace(demand.facts, layers=33))
    topology = read_topology(EXAMPLES / "v100-and-3090.yaml")
    plan = describe_map("by hand", topology, demand, DeviceMap(path=(0, 1), layers=(first, 33 - first)))
    assert plan.tokens_per_s == pytest.approx(tokens_per_s, rel=0.1)
    assert plan.latency_ms == pytest.approx(1e3 / tokens_per_s, abs=1.8)
    assert all(stage.memory_gib <= stage.usable_gib for stage in plan.stages)


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.iterdir()))
@pytest.mark.parametrize("deployer", DEPLOYERS)
def test_each_deployer_plans_the_shipped_examples(example: str, deployer: str) -> None:
    plan = plan_deployment(deployer, read_topology(EXAMPLES / example), demand_of(MODEL, 1024, 8192))
    assert sum(stage.layers for stage in plan.stages) == 28
    assert plan.stages[0].device == "GPU0"


def test_a_layer_takes_its_share_of_the_roofline() -> None:
    demand = demand_of("Mistral-7B", 1000, 8192)
    row = hardware_prior("A100-80GB", 1, "Mistral-7B")
    assert row is not None
    (device,) = parse_topology({"devices": [{"name": "a", "gpu": "A100-80GB", "memory_gib": 80}]}).devices
    step_ms = row.decode_a_ms + row.decode_b_ms_per_seq + 1000 * row.decode_c_ms_per_context_token
    assert 32 * layer_time_ms(device, demand) == pytest.approx(step_ms)
    assert layer_time_ms(replace(device, speed_share=0.5), demand) == pytest.approx(2 * layer_time_ms(device, demand))


def test_a_plan_names_stages_predictions_and_the_flags_of_vllm() -> None:
    devices = [
        {"name": "fast", "gpu": "RTX-4090", "memory_gib": 24, "index": 2},
        {"name": "slow", "gpu": "L4", "memory_gib": 22.5, "index": 0},
    ]
    topology = parse_topology({"devices": devices, "links": [{"between": ["slow", "fast"], "bandwidth_gb_s": 10, "latency_us": 20}]})
    plan = plan_deployment("lr", topology, demand_of("Llama-2-13B", 1024, 4096))
    assert [(stage.device, stage.first_layer, stage.layers) for stage in plan.stages] == [("fast", 0, 29), ("slow", 29, 11)]
    assert plan.hops_ms == pytest.approx(0.02 + 5120 * 2 / 10e6)
    assert plan.latency_ms == pytest.approx(sum(stage.compute_ms for stage in plan.stages) + plan.hops_ms)
    assert plan.tokens_per_s == pytest.approx(1e3 / plan.latency_ms)
    assert plan.pipelined_tokens_per_s == pytest.approx(1e3 / max(plan.stages[0].compute_ms + plan.hops_ms, plan.stages[1].compute_ms))
    assert plan.utilisation == pytest.approx((plan.latency_ms - plan.hops_ms) / plan.latency_ms / 2)
    assert dict(plan.environment) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,0",
        "VLLM_PP_LAYER_PARTITION": "29,11",
    }
    assert plan.flags == ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "1")


def test_a_model_that_does_not_fit_is_refused_with_the_memory_that_is_short() -> None:
    """137.95 GB of weights: further devices would have to hold the rest."""
    demand = demand_of("Llama-2-70B", 1024, 8192)
    with pytest.raises(ConfigError, match="no map fits") as refused:
        plan_deployment("helr", unlike(24, 24, 24, 24), demand)
    short_gib = float(re.findall(r"short by ([\d.]+) GiB", refused.value.message)[0])
    assert short_gib == pytest.approx(80 * demand.layer_gib - 48 * demand.layer_gib, abs=0.01)
    assert plan_deployment("helr", unlike(24, 24, 24, 24, 24, 24, 24), demand).stages


def test_devices_that_hold_it_without_a_path_are_refused() -> None:
    pairs = [{"between": ["a", "b"], "class": "PIX"}, {"between": ["c", "d"], "class": "PIX"}]
    devices = [{"name": name, "gpu": "RTX-3090", "memory_gib": 24} for name in "abcd"]
    topology = parse_topology({"devices": devices, "links": pairs})
    with pytest.raises(ConfigError, match="no path of linked devices"):
        plan_deployment("helr", topology, demand_of("Qwen2.5-32B", 1024, 0))


def test_the_profile_of_one_device_is_the_prior_of_its_pair_and_unlike_stages_add_up() -> None:
    demand = demand_of(MODEL, 1024, 8192)
    one = read_topology(EXAMPLES / "four-3090.yaml")
    plan = plan_deployment("helr", one, demand)
    row, prior = profile_of_map(one, demand, plan), hardware_prior("RTX-3090", 1, MODEL)
    assert prior is not None
    assert row.decode_step_s(10, 3_000) == pytest.approx(prior.decode_step_s(10, 3_000))
    assert row.prefill_s(500) == pytest.approx(prior.prefill_s(500))
    assert row.kv_capacity_tokens == pytest.approx(prior.kv_capacity_tokens, rel=0.01)
    plan = plan_deployment("even", one, demand)
    split = profile_of_map(one, demand, plan)
    assert split.decode_step_s(1, 1024) == pytest.approx(plan.latency_ms * 1e-3)
    shares = [1.0, 300 / 350, 250 / 350, 150 / 350]
    slower = sum(share ** (-1 / 3) for share in shares) / 4
    assert split.decode_b_ms_per_seq == pytest.approx(slower * prior.decode_b_ms_per_seq)
    assert (split.gpu, split.n_gpu) == ("pipeline-RTX-3090", 4)


def test_even_splits_over_all_devices() -> None:
    plan = plan_deployment("even", read_topology(EXAMPLES / "four-3090.yaml"), demand_of(MODEL, 1024, 8192))
    assert [(stage.device, stage.layers) for stage in plan.stages] == [("GPU0", 7), ("GPU1", 7), ("GPU2", 7), ("GPU3", 7)]


def test_trials_of_the_stress_search_cost_time() -> None:
    plan = plan_deployment("stress", read_topology(EXAMPLES / "four-3090.yaml"), demand_of(MODEL, 1024, 8192), trial_s=10.0)
    assert plan.search_s == pytest.approx(7 * (10.0 + 12.488 / 3.2))  # one device once, two to four filled and even
    assert plan_deployment("helr", read_topology(EXAMPLES / "four-3090.yaml"), demand_of(MODEL, 1024, 8192)).search_s == 0.0


# The commands ---------------------------------------------------------------------------------------------------------


def deploy(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["deploy", *arguments])


def test_plan_prints_the_command_line_of_vllm_and_json() -> None:
    example = str(EXAMPLES / "four-3090.yaml")
    shown = deploy("plan", "--model", "Llama-2-13B", "--topology", example, "--kv-tokens", "32768", "--deployer", "lr")
    assert shown.exit_code == 0, shown.output
    assert "VLLM_PP_LAYER_PARTITION=16,16,8 vllm serve WEIGHTS --served-model-name Llama-2-13B" in shown.output
    assert "--pipeline-parallel-size 3 --tensor-parallel-size 1" in shown.output
    document = json.loads(deploy("plan", "-m", MODEL, "--topology", example, "--json").output)
    assert document["stages"][0] | {"compute_ms": 0} == document["stages"][0] | {"compute_ms": 0, "device": "GPU0", "layers": 28}


def test_compare_has_a_row_for_each_deployer() -> None:
    arguments = ("plan", "-m", MODEL, "--topology", str(EXAMPLES / "four-3090.yaml"), "--compare")
    shown = deploy(*arguments)
    assert shown.exit_code == 0, shown.output
    assert all(name in shown.output for name in DEPLOYERS)
    assert [plan["deployer"] for plan in json.loads(deploy(*arguments, "--json").output)["plans"]] == list(DEPLOYERS)


def test_apply_writes_an_agent_that_starts_with_the_profile_of_its_map(tmp_path: Path) -> None:
    example = str(EXAMPLES / "four-3090.yaml")
    shown = deploy("plan", "-m", "Llama-2-13B", "--topology", example, "--apply", str(tmp_path / "made"))
    assert shown.exit_code == 0, shown.output
    text = (tmp_path / "made/agent.yaml").read_text()
    assert "VLLM_PP_LAYER_PARTITION=26,14 vllm serve" in text
    config = AgentConfig.model_validate(yaml.safe_load(text))
    snapshot = parse_profiles((tmp_path / "made/profile.yaml").read_text())
    (served,) = served_models(config, snapshot).values()
    assert served.profile is not None
    plan = plan_deployment("helr", read_topology(Path(example)), demand_of("Llama-2-13B", 1024, 8192))
    assert served.profile.decode_step_s(1, 1024) == pytest.approx(plan.latency_ms * 1e-3)
    refused = deploy("plan", "-m", "Llama-2-13B", "--topology", example, "--compare", "--apply", str(tmp_path))
    assert (refused.exit_code, "goes without --compare" in refused.output) == (2, True)


def test_picture_is_a_png_of_one_map_or_of_all(tmp_path: Path) -> None:
    for options in ((), ("--compare",)):
        path = tmp_path / f"map{len(options)}.png"
        shown = deploy("plan", "-m", MODEL, "--topology", str(EXAMPLES / "four-3090.yaml"), "--picture", str(path), *options)
        assert shown.exit_code == 0, shown.output
        assert path.read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_one_error_and_exit_code_2(tmp_path: Path) -> None:
    example = str(EXAMPLES / "four-3090.yaml")
    unknown = deploy("plan", "-m", "GPT-9", "--topology", example)
    assert (unknown.exit_code, "model 'GPT-9': must be one of Mistral-7B" in unknown.output) == (2, True)
    short = deploy("plan", "-m", "Llama-2-70B", "--topology", example, "--compare")
    assert (short.exit_code, "short by" in short.output) == (2, True)
    (tmp_path / "twice.yaml").write_text("devices: [{name: a, gpu: L4, memory_gib: 24}, {name: a, gpu: L4, memory_gib: 24}]\n")
    twice = deploy("plan", "-m", MODEL, "--topology", str(tmp_path / "twice.yaml"))
    assert (twice.exit_code, "device a: name: must be given once" in twice.output) == (2, True)


def test_probe_writes_a_topology_that_plan_reads(tmp_path: Path) -> None:
    sample = Path(__file__).parent / "deploy_samples" / "unlike-pair.txt"
    written = deploy("probe", "--nvidia-smi", str(sample))
    assert written.exit_code == 0, written.output
    (tmp_path / "topology.yaml").write_text(written.output)
    shown = deploy("plan", "-m", MODEL, "--topology", str(tmp_path / "topology.yaml"), "--deployer", "lr")
    assert shown.exit_code == 0, shown.output
    assert "CUDA_VISIBLE_DEVICES=1 vllm serve WEIGHTS" in shown.output


def test_probe_of_a_host_without_nvidia_smi_is_one_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    written = deploy("probe")
    assert written.exit_code == 0, written.output
    assert "gpu: CPU" in written.output
