"""The configuration that `qlm serve` makes of its findings."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from qlm_agent.config import AgentConfig, served_models
from qlm_cli.root import root
from qlm_cli.serve.command import changed_processes
from qlm_cli.serve.discovery import FoundModel, FoundServer
from qlm_cli.serve.document import KEY_VARIABLE, PARAMETERS_BILLION, Document, ServeOptions, document, facts_of, size_billion
from qlm_cli.serve.local import Host, LocalModel, LocalOptions, local_document
from qlm_cli.serve.machine import local_model, this_host
from qlm_core.profiles.hardware_prior import gpu_facts
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import ConfigError
from qlm_gateway.config import GatewayConfig, aliases_of

LLAMA = FoundModel(name="meta-llama/Llama-3.3-70B-Instruct", context_tokens=32_768)
SMALL = FoundModel(name="small", context_tokens=4_096, tokenizer="/models/small/tokenizer.json")
FIRST = FoundServer(url="http://gpu-1:8000", models=(LLAMA,), is_vllm=True)
SECOND = FoundServer(url="http://gpu-2:8000/engine", models=(replace(LLAMA, context_tokens=16_384), SMALL), is_vllm=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8.0),
        ("SmolLM2-135M-Instruct", 0.135),
        ("Qwen/Qwen2.5-0.5B", 0.5),
        ("Mixtral-8x7B-Instruct-v0.1", 56.0),
        ("Qwen3-30B-A3B", 30.0),
        ("gpt-oss-120b", 120.0),
        ("support-bot", PARAMETERS_BILLION),
        ("gpt-4", PARAMETERS_BILLION),
        ("none-0b", PARAMETERS_BILLION),
        ("9" * 400 + "b", 10_000.0),
    ],
)
def test_the_size_of_a_model_is_read_from_its_name(name: str, expected: float) -> None:
    assert size_billion(name) == expected
    assert facts_of(name).parameters_billion == expected


def test_models_are_served_by_all_their_servers_with_the_least_context() -> None:
    made = document([FIRST, SECOND], ServeOptions(aliases={"usual": LLAMA.name}))
    assert [(model["name"], model["context_tokens_max"], model["aliases"]) for model in made["models"]] == [
        (LLAMA.name, 16_384, ["usual"]),
        ("small", 4_096, []),
    ]
    first, second = made["agents"]
    assert (first["name"], first["models"], first["n_gpu"]) == ("gpu-1-8000", [LLAMA.name], 2)
    assert (second["name"], second["models"]) == ("gpu-2-8000-engine", [LLAMA.name, "small"])
    assert second["openai"]["base_url"] == "http://gpu-2:8000/engine"
    config = AgentConfig.model_validate({"models": made["models"], "agent": second})
    (alone,) = document([FIRST], ServeOptions())["agents"]
    assert alone["n_gpu"] == 4, "for the KV of its longer context"
    assert all(model.profile is not None for model in served_models(config, shipped_snapshot()).values()), "a prior to plan with"
    assert aliases_of(GatewayConfig.model_validate({"models": made["models"], "gateway": made["gateways"][0]}).models) == {
        "usual": LLAMA.name
    }


@pytest.mark.parametrize(
    ("server", "tokenizers", "output"),
    [
        (FoundServer(url="http://a:1", models=(SMALL,), is_vllm=True), {}, "tokens"),
        (FoundServer(url="http://a:1", models=(SMALL,)), {}, "text"),
        (FIRST, {}, "text"),
        (FIRST, {LLAMA.name: "/models/llama/tokenizer.json"}, "tokens"),
        (SECOND, {}, "text"),
    ],
)
def test_vllm_with_tokenizers_for_all_its_models_is_spoken_to_in_tokens(
    server: FoundServer, tokenizers: dict[str, str], output: str
) -> None:
    (agent,) = document([server], ServeOptions(tokenizers=tokenizers))["agents"]
    assert agent["openai"]["output"] == output
    assert agent["openai"]["continues_chats"] == server.is_vllm


@pytest.mark.parametrize(
    ("options", "servers", "reason"),
    [
        (ServeOptions(gpu="H1000"), [FIRST], "--gpu H1000: may be"),
        (ServeOptions(aliases={"a": "none"}), [FIRST], "no server serves none; found: meta-llama"),
        (ServeOptions(tokenizers={"none": "/t.json"}), [FIRST], "no server serves none"),
        (ServeOptions(), [FIRST, FIRST], "given twice"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: ServeOptions, servers: list[FoundServer], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        document(servers, options)


@pytest.mark.parametrize("aliases", [("a", "a"), ("small",), ("",)])
def test_an_alias_is_a_name_of_its_own(aliases: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="aliases"):
        aliases_of(GatewayConfig.model_validate({"models": [{"name": "small", "profile": "small", "aliases": aliases}]}).models)


def test_a_first_profile_is_measured_unless_it_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[int] = []

    async def found(urls: object, api_key: str) -> tuple[list[FoundServer], list[object]]:
        return [FIRST], []

    def run(settings: Document, state_dir: Path, overrides: object, *tasks: object) -> int:
        beside.append(len(tasks))
        return 0

    monkeypatch.setattr("qlm_cli.serve.command.discover", found)
    monkeypatch.setattr("qlm_cli.serve.command._run", run)
    monkeypatch.setenv(KEY_VARIABLE, "")
    for words in ((), ("--no-first-profile",)):
        done = CliRunner().invoke(root, ["serve", FIRST.url, "--state-dir", str(tmp_path), *words])
        assert done.exit_code == 0, done.output
    assert beside == [2, 1]


def test_only_processes_that_read_other_settings_start_again() -> None:
    options = ServeOptions()
    one, two = document([FIRST], options), document([FIRST, FoundServer(url="http://gpu-3:1", models=(LLAMA,))], options)
    assert changed_processes(one, two) == [], "a server of a known model is added beside all else"
    assert changed_processes(two, one) == []
    less = document([FIRST, SECOND], options)
    assert changed_processes(one, less) == ["gateway-0", "planner-0", "estimator-0", "gpu-1-8000"], "its context is another now"
    small = FoundServer(url="http://gpu-3:1", models=(SMALL,))
    assert changed_processes(one, document([FIRST, small], options)) == ["gateway-0", "planner-0", "estimator-0"]


# vLLM on this machine -------------------------------------------------------------------------------------------------

EIGHT = LocalModel(name="eight", folder="/m/eight", context_tokens=131_072, vocabulary_size=128_256, facts=facts_of("llama-8b"))
BIG = replace(EIGHT, name="big", folder="/m/big", facts=facts_of("llama-70b"))
FOUR = Host(gpu="A100-80GB", gpus=("0", "1", "2", "3"), memory_gb=512.0)


def _instances(made: Document) -> list[tuple[list[str], int, str]]:
    return [(agent["models"], agent["n_gpu"], agent["vllm"]["gpus"]) for agent in made["agents"]]


def test_models_that_fit_a_gpu_share_all_of_them() -> None:
    made = local_document([EIGHT], FOUR, LocalOptions(aliases={"usual": "eight"}))
    assert _instances(made) == [(["eight"], 1, str(number)) for number in range(4)]
    (model,) = made["models"]
    assert (model["weights"], model["tokenizer"], model["aliases"]) == ("/m/eight", "/m/eight/tokenizer.json", ["usual"])
    assert 100_000 < model["context_tokens_max"] <= 131_072
    config = AgentConfig.model_validate({"models": made["models"], "agent": made["agents"][0]})
    assert all(each.profile is not None for each in served_models(config, shipped_snapshot()).values()), "a prior to plan with"
    vllm = config.agent.vllm
    assert vllm.device == "cuda"
    assert 70.0 < EIGHT.facts.weights_gb + vllm.kv_cache_gb < 0.9 * gpu_facts()[FOUR.gpu].memory_gb
    assert 4 * (vllm.host_memory_gb + vllm.host_kv_gb) < 512.0


def test_a_model_gets_as_many_gpus_as_hold_it_and_pinned_ones_are_alone() -> None:
    assert _instances(local_document([BIG, EIGHT], FOUR, LocalOptions())) == [(["big", "eight"], 2, "0,1"), (["big", "eight"], 2, "2,3")]
    pinned = local_document([BIG, EIGHT], FOUR, LocalOptions(pins={"big": 1}))
    assert _instances(pinned) == [(["big"], 2, "0,1"), (["eight"], 1, "2"), (["eight"], 1, "3")]


def test_contexts_fit_in_the_kv_of_the_instances() -> None:
    """Beside the weights of a large model there is less room, and a model of the CPU has a share of the host's memory."""
    small = replace(EIGHT, facts=facts_of("small-1b"))
    for made in (local_document([BIG, EIGHT], FOUR, LocalOptions()), local_document([small], Host(memory_gb=24.0), LocalOptions())):
        for model in made["models"]:
            for agent in made["agents"]:
                kv_bytes = agent["vllm"]["kv_cache_gb"] * agent["n_gpu"] * 1e9
                each = 2 * 2 * model["facts"]["layers"] * model["facts"]["kv_heads"] * model["facts"]["head_size"]
                assert 0 < model["context_tokens_max"] <= kv_bytes / each - 33


def test_without_a_gpu_one_instance_computes_on_the_cpu() -> None:
    tiny = replace(EIGHT, name="tiny", context_tokens=2_048, facts=facts_of("tiny-135m"))
    (agent,) = local_document([tiny], Host(memory_gb=24.0), LocalOptions())["agents"]
    assert (agent["gpu"], agent["vllm"]["device"], agent["vllm"]["gpus"], agent["batch_max"]) == ("CPU", "cpu", "", 16)
    assert agent["vllm"]["kv_cache_gb"] <= 2.4


@pytest.mark.parametrize(
    ("models", "host", "options", "reason"),
    [
        ([BIG], replace(FOUR, gpus=("0",)), LocalOptions(), "no room"),
        ([EIGHT], replace(FOUR, gpu="B300"), LocalOptions(), "--gpu B300"),
        ([EIGHT, EIGHT], FOUR, LocalOptions(), "two folders"),
        ([EIGHT], FOUR, LocalOptions(pins={"none": 1}), "none"),
        ([EIGHT], FOUR, LocalOptions(pins={"eight": 5}), "1 GPUs more"),
        ([BIG, EIGHT], FOUR, LocalOptions(pins={"big": 2}), "0 of 4 are left"),
    ],
)
def test_what_does_not_fit_this_machine_is_refused(models: list[LocalModel], host: Host, options: LocalOptions, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        local_document(models, host, options)


@pytest.mark.parametrize("words", ["--engine vllm", "--engine vllm --model . http://a", "--gpus 1", "--pin a=0"])
def test_options_of_the_other_engine_are_wrong_use(words: str) -> None:
    assert CliRunner().invoke(root, ["serve", *words.split()]).exit_code == 2


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with three GPUs of two kinds."""
    lines = ["NVIDIA H100 80GB HBM3, 81559, 580.1", "NVIDIA H100 80GB HBM3, 81559, 580.1", "NVIDIA H200, 143771, 580.1"]
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("smi")
def test_the_gpus_of_this_machine_are_those_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (this_host(None, 2).gpu, this_host(None, 2).gpus) == ("H100-80GB", ("0", "1"))
    assert (this_host("H100-80GB", None).gpus, this_host(None, 0).gpus) == (("0", "1", "2"), ())
    for wrong, reason in (((None, None), "unlike"), ((None, 4), "has 3")):
        with pytest.raises(ConfigError, match=reason):
            this_host(*wrong)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert (this_host(None, None).gpu, this_host(None, None).gpus) == ("H200", ("2",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f")
    with pytest.raises(ConfigError, match="--gpu"):
        this_host(None, None)
    assert this_host("H200", None).gpus == ("GPU-1f",)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        local_model(tmp_path)


def test_a_driver_that_fails_is_no_machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'couldn't communicate with the driver'\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="--gpus 0"):
        this_host(None, None)
    assert this_host(None, 0).gpus == ()
