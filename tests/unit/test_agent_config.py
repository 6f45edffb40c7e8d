"""Settings of an agent: those that fit together, and those refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from qlm_agent.__main__ import main
from qlm_agent.config import AgentConfig, AgentSettings, instance_facts, machine_settings, served_models, simulated_policy
from qlm_agent.engines.policies.feedback import FastServe
from qlm_agent.engines.policies.port import KvRule
from qlm_agent.engines.policies.registry import FirstComeFirstServed
from qlm_agent.engines.policies.urgency import UrgencyFirst
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.config import load_config
from sleeping_gpu import WEIGHTS_BYTES, model_folder

YAML = """
models:
  - {name: mistral-7b, profile: Mistral-7B}
  - {name: vicuna-13b, profile: Vicuna-13B, context_tokens_max: 4096}
agent: {batch_max: 64}
agents:
  - {name: a100-0, gpu: A100-80GB, simulated: {time_scale: 4.0}}
  - {name: a10-0, gpu: A10, models: [mistral-7b]}
  - {name: wrong, gpu: A10, models: [vicuna-13b]}
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "qlm.yaml"
    file.write_text(YAML)
    return str(file)


def test_an_entry_of_the_list_is_one_agent(path: str) -> None:
    config = load_config(AgentConfig, path, "agents", "a100-0", {}, {})
    models = served_models(config, shipped_snapshot())
    assert tuple(models) == ("mistral-7b", "vicuna-13b")
    assert models["vicuna-13b"].spec.context_tokens_max == 4096
    profile = models["vicuna-13b"].profile
    assert profile is not None
    assert profile.kv_capacity_tokens == 59_360
    facts = instance_facts(config.agent, tuple(models), "127.0.0.1:1")
    assert (facts.name, facts.gpu, facts.time_scale, facts.batch_max, facts.address) == ("a100-0", "A100-80GB", 4.0, 64, "127.0.0.1:1")


def test_the_machine_knows_the_gpu_by_its_own_clock(path: str) -> None:
    config = load_config(AgentConfig, path, "agents", "a100-0", {"agent.kv_swap": "false"}, {})
    models = served_models(config, shipped_snapshot())
    settings = machine_settings(config.agent, models)
    assert settings.models == ("mistral-7b", "vicuna-13b")
    assert (settings.evict, settings.kv_swap, settings.host_memory_gb) == (True, False, 64.0)
    measured, scaled = models["vicuna-13b"].profile, settings.hardware["vicuna-13b"]
    assert measured is not None
    assert scaled.kv_swap_us_per_token == measured.kv_swap_us_per_token / 4.0
    assert scaled.weights_gb == measured.weights_gb


def test_models_of_the_entry_only(path: str) -> None:
    config = load_config(AgentConfig, path, "agents", "a10-0", {}, {})
    assert tuple(served_models(config, shipped_snapshot())) == ("mistral-7b",)


@pytest.mark.parametrize(
    ("entry", "overrides", "named"),
    [
        ("wrong", {}, "no profile of Vicuna-13B on 1 x A10"),
        ("a10-0", {"agent.models": "[gpt]"}, "agent.models: gpt"),
        ("a100-0", {"agent.gpu": "TPU"}, "1 x TPU"),
    ],
)
def test_what_does_not_fit_is_named(path: str, entry: str, overrides: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        served_models(load_config(AgentConfig, path, "agents", entry, overrides, {}), shipped_snapshot())


@pytest.mark.parametrize(
    "setting",
    ["agent.simulated.step_noise=0.01", "agent.simulated.bias_max=0.5", "agent.batch_max=0", "agent.name=a/b", "agent.engine=gpt"],
)
def test_wrong_values_stop_the_process_with_their_name(path: str, setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", path, "--name", "a100-0", "--set", setting]) == 2
    assert setting.partition("=")[0] in capsys.readouterr().err


FACTS = {"parameters_billion": 0.1, "layers": 2, "hidden_size": 64, "kv_heads": 2, "head_size": 32}


def real(**model: object) -> AgentConfig:
    named = {"name": "tiny", "profile": "tiny", **model}
    return AgentConfig.model_validate({"models": [named], "agent": {"gpu": "CPU", "engine": "vllm", "vllm": {"host_memory_gb": 3}}})


def test_a_real_engine_serves_what_has_weights_with_a_rough_profile_from_facts() -> None:
    config = real(weights="folder", facts=FACTS)
    models = served_models(config, shipped_snapshot())
    assert models["tiny"].weights == "folder"
    assert models["tiny"].profile is not None
    settings = machine_settings(config.agent, models)
    assert (settings.host_memory_gb, list(settings.hardware)) == (3.0, ["tiny"])


def test_the_machine_counts_weights_as_vllm_does(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "tiny")
    models = served_models(real(weights=folder, facts=FACTS), shipped_snapshot())
    config = real(weights=folder, facts=FACTS)
    assert machine_settings(config.agent, models).weights_gb == {"tiny": WEIGHTS_BYTES / 1e9}
    assert machine_settings(config.agent, models).host_kv_apart
    assert machine_settings(config.agent, served_models(real(weights="gone", facts=FACTS), shipped_snapshot())).weights_gb == {}


def test_a_real_engine_can_be_measured_before_anything_is_known_of_it() -> None:
    config = real(weights="folder")
    models = served_models(config, shipped_snapshot())
    assert models["tiny"].profile is None
    assert machine_settings(config.agent, models).hardware == {}
    with pytest.raises(ConfigError, match="no model of models"):
        served_models(real(), shipped_snapshot())


def test_the_policy_inside_the_simulated_engine_is_a_setting() -> None:
    made = simulated_policy(AgentSettings(engine_policy="fastserve", engine_policy_options={"kv": "recompute", "promote_s": 1.0}))
    assert (type(made), made.kv) == (FastServe, KvRule.RECOMPUTE)
    assert type(simulated_policy(AgentSettings())) is FirstComeFirstServed
    named = f"{UrgencyFirst.__module__}:{UrgencyFirst.__name__}"
    assert type(simulated_policy(AgentSettings(engine_policy=named))) is UrgencyFirst
    for wrong, message in ((("nobody", {}), "fastserve"), (("fastserve", {"kv": "none"}), "kv|none"), (("os:nothing", {}), "nothing")):
        with pytest.raises(ConfigError, match=message):
            simulated_policy(AgentSettings(engine_policy=wrong[0], engine_policy_options=wrong[1]))
