"""From settings and a model's folder to what an engine process loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlm_agent.engines.port import ModelLoadFailed, Sampling
from qlm_agent.engines.vllm.engine import sampling_document
from qlm_agent.engines.vllm.folder import ModelFolder
from qlm_agent.engines.vllm.plans import VllmModel, environment, load_plan
from qlm_agent.engines.vllm.process.versions import check_device, check_version
from qlm_agent.engines.vllm.runner.llm_engine import engine_arguments, vllm_arguments
from qlm_agent.engines.vllm.runner.runs import kv_limit_tokens
from qlm_agent.engines.vllm.settings import VllmSettings
from qlm_core.vocabulary.errors import ConfigError

CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
TOKEN_BYTES = 2 * 4 * 4 * 2 * 32
"""Keys and values, float32, layers, KV heads, head size."""


def folder_of(path: Path, config: dict[str, Any] | None = None, *, weights: int = 100, tokenizer: str = "{}") -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (path / "tokenizer.json").write_text(tokenizer)
    (path / "model.safetensors").write_bytes(bytes(weights))
    return str(path)


def test_a_folder_says_what_a_model_needs(tmp_path: Path) -> None:
    folder = ModelFolder.read("m", folder_of(tmp_path / "m", weights=1000))
    assert folder.weights_bytes == 1000
    assert folder.kv_bytes_per_token("float32") == TOKEN_BYTES
    assert folder.kv_bytes_per_token("bfloat16") == TOKEN_BYTES // 2


def test_weights_are_the_files_that_the_index_names(tmp_path: Path) -> None:
    folder = Path(folder_of(tmp_path / "m"))
    (folder / "consolidated.safetensors").write_bytes(bytes(77))  # the same once more, in another layout
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model.safetensors", "y": "model.safetensors"}}))
    read = ModelFolder.read("m", str(folder))
    assert (read.weights_bytes, [each.name for each in read.files]) == (100, ["model.safetensors"])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadFailed, match=r"has no model\.safetensors"):
        ModelFolder.read("m", str(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadFailed, match=r"index\.json cannot be read"):
        ModelFolder.read("m", str(folder))


def test_models_of_one_shape_take_each_others_place(tmp_path: Path) -> None:
    first = ModelFolder.read("m", folder_of(tmp_path / "a", weights=10)).shape
    assert ModelFolder.read("m", folder_of(tmp_path / "b", {**CONFIG, "_name_or_path": "x"}, weights=20)).shape == first
    assert ModelFolder.read("m", folder_of(tmp_path / "c", {**CONFIG, "num_hidden_layers": 5})).shape != first
    assert ModelFolder.read("m", folder_of(tmp_path / "d", tokenizer='{"x": 1}')).shape != first


def test_missing_files_of_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=r"models\.weights is empty"):
        ModelFolder.read("m", "")
    with pytest.raises(ModelLoadFailed, match=r"no config\.json, tokenizer\.json, \*\.safetensors"):
        ModelFolder.read("m", str(tmp_path))
    with pytest.raises(ModelLoadFailed, match="cannot be read"):
        ModelFolder.read("m", "x" * 300)
    folder = Path(folder_of(tmp_path / "odd", weights=10))
    for config in ("[1]", '["a"]', "7"):
        (folder / "config.json").write_text(config)
        with pytest.raises(ModelLoadFailed, match="cannot be read"):
            ModelFolder.read("m", str(folder))
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "tokenizer.json").write_text("")
    (tmp_path / "a.safetensors").write_text("")
    with pytest.raises(ModelLoadFailed, match="cannot be read"):
        ModelFolder.read("m", str(tmp_path))


@pytest.mark.parametrize("config", [None, 3, ["a"], "text"])
def test_a_config_that_is_no_object_is_a_failed_load(tmp_path: Path, config: object) -> None:
    folder = Path(folder_of(tmp_path / "m"))
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadFailed, match=r"m cannot be read: config\.json is no JSON object"):
        ModelFolder.read("m", str(folder))


@pytest.mark.parametrize("wrong", [{"num_attention_heads": 0}, {"hidden_size": None}, {"num_hidden_layers": 1e400}])
def test_a_config_without_sensible_figures_is_a_failed_load(tmp_path: Path, wrong: dict[str, Any]) -> None:
    folder = ModelFolder.read("m", folder_of(tmp_path / "m", {**CONFIG, **wrong}))
    assert folder.facts is None
    with pytest.raises(ModelLoadFailed, match="does not say layers, heads and hidden size"):
        folder.kv_bytes_per_token("float32")


@pytest.mark.parametrize(("blocks", "context", "longest"), [(100, 2048, 2048), (11, 2048, 320), (2, 2048, 32), (1, 2048, 0), (0, 8, 0)])
def test_kv_bounds_the_longest_run(blocks: int, context: int, longest: int) -> None:
    assert kv_limit_tokens(context, blocks * 32 * 10 + 9, 10, 32) == longest


def test_a_plan_follows_from_the_settings(tmp_path: Path) -> None:
    model = VllmModel(name="m", weights=folder_of(tmp_path / "m"), context_tokens_max=2048)
    folder = ModelFolder.read("m", model.weights)
    settings = VllmSettings(kv_cache_gb=33 * 32 * TOKEN_BYTES / 1e9, host_kv_gb=0.5, arguments={"seed": 7})
    plan = load_plan(model, folder, settings, batch_max=16, n_gpu=2)
    assert (plan.engine["max_model_len"], plan.engine["max_num_seqs"], plan.engine["seed"]) == (1024, 16, 7)
    assert (plan.host_kv_bytes, plan.kv_bytes_per_token) == (500_000_000, TOKEN_BYTES)
    assert not {"tensor_parallel_size", "gpu_memory_utilization"} & set(plan.engine)
    on_gpu = load_plan(model, folder, settings.model_copy(update={"device": "cuda"}), batch_max=16, n_gpu=2)
    assert (on_gpu.engine["tensor_parallel_size"], on_gpu.engine["enable_sleep_mode"]) == (2, True)
    assert on_gpu.device_bytes == 50 + 33 * 32 * TOKEN_BYTES
    assert on_gpu.engine["max_model_len"] == 2048, "each GPU has the KV of one of the two heads"
    assert on_gpu.engine["gpu_memory_utilization"] < 0.1, "vLLM would refuse to start beside models that sleep"
    ordered = replace(model, policy="mine:Policy", policy_options={"lead_s": 3.0})
    plan = load_plan(ordered, folder, settings, batch_max=16, n_gpu=1)
    assert (plan.policy, plan.policy_options) == ("mine:Policy", {"lead_s": 3.0})
    with pytest.raises(ModelLoadFailed, match=r"agent\.vllm\.kv_cache_gb"):
        load_plan(model, folder, settings.model_copy(update={"kv_cache_gb": 1e-6}), batch_max=16, n_gpu=1)


@pytest.mark.parametrize(
    ("device", "arguments", "scheduler"),
    [("cpu", {}, "QlmScheduler"), ("cuda", {}, "QlmScheduler"), ("cuda", {"async_scheduling": True}, "QlmAsyncScheduler")],
)
def test_the_scheduler_fits_the_way_of_scheduling(tmp_path: Path, device: str, arguments: dict[str, bool], scheduler: str) -> None:
    """Both order by the one policy."""
    model = VllmModel(name="m", weights=folder_of(tmp_path / "m"), context_tokens_max=2048, policy="mine:Policy")
    settings = VllmSettings.model_validate({"device": device, "arguments": arguments})
    found = engine_arguments(load_plan(model, ModelFolder.read("m", model.weights), settings, batch_max=16, n_gpu=1))
    assert found["scheduler_cls"] == f"qlm_agent.engines.vllm.scheduler.scheduler.{scheduler}"
    assert found["async_scheduling"] is (scheduler == "QlmAsyncScheduler")
    assert found["additional_config"]["qlm"]["policy"] == "mine:Policy"


def test_an_engine_has_its_threads_and_asks_no_hub() -> None:
    assert environment(VllmSettings(cpu_threads=3))["OMP_NUM_THREADS"] == "3"
    assert environment(VllmSettings())["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "OMP_NUM_THREADS" not in environment(VllmSettings(device="cuda"))
    assert environment(VllmSettings(device="cuda", gpus="2,3"))["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in environment(VllmSettings(device="cuda"))


def test_sampling_parameters_keep_their_meaning() -> None:
    sampling = Sampling(temperature=0.5, stop=("x",), seed=3, logprobs=2, presence_penalty=0.25, regex="a+")
    arguments = vllm_arguments(sampling_document(sampling), 12, {"temperature": 0.7, "top_p": 0.9, "max_tokens": 99})
    assert arguments == {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "presence_penalty": 0.25,
        "logprobs": 2,
        "structured_outputs": {"regex": "a+"},
        "max_tokens": 12,
        "detokenize": False,
    }


@pytest.mark.parametrize("version", ["0.31.9", "0.10.2rc1"])
def test_an_old_vllm_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match="too old"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.40.1", "dev"])
def test_others_are_taken(version: str) -> None:
    check_version(version)


def test_a_vllm_for_another_device_is_refused() -> None:
    check_device("cuda", "cuda")
    with pytest.raises(ConfigError, match=r"agent\.vllm\.device: cuda, and this vLLM computes on cpu; see docs"):
        check_device("cpu", "cuda")
    with pytest.raises(ConfigError, match="cuda, and this vLLM sees no device"):
        check_device("", "cuda")
