"""The configuration that `qlm serve` makes of what it found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qlm_agent.config import AgentConfig, served_models
from qlm_cli.serve.command import changed_processes
from qlm_cli.serve.discovery import FoundModel, FoundServer
from qlm_cli.serve.document import PARAMETERS_BILLION, ServeOptions, document, facts_of, size_billion
from qlm_core.errors import ConfigError
from qlm_core.shipped_profiles import shipped_snapshot
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


def test_only_processes_that_read_other_settings_start_again() -> None:
    options = ServeOptions()
    one, two = document([FIRST], options), document([FIRST, FoundServer(url="http://gpu-3:1", models=(LLAMA,))], options)
    assert changed_processes(one, two) == [], "a server of a known model is added beside all else"
    assert changed_processes(two, one) == []
    less = document([FIRST, SECOND], options)
    assert changed_processes(one, less) == ["gateway-0", "planner-0", "estimator-0", "gpu-1-8000"], "its context is another now"
    small = FoundServer(url="http://gpu-3:1", models=(SMALL,))
    assert changed_processes(one, document([FIRST, small], options)) == ["gateway-0", "planner-0", "estimator-0"]
