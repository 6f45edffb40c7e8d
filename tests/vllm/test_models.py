"""Models that `qlm models` makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from qlm_cli.models.found_model import read_model
from qlm_cli.root import root
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_gateway.text.model_text import open_text


def test_the_same_name_gives_the_same_model_and_another_another(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        result = CliRunner().invoke(root, ["models", "--folder", str(tmp_path / folder), "random", "a", "b"])
        assert result.exit_code == 0, result.output
    weights = {path.parent.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob("*/*/model.safetensors")}
    assert weights[Path("x/a")] == weights[Path("y/a")] != weights[Path("x/b")]
    texts = {path.read_bytes() for path in tmp_path.glob("*/*/tokenizer.json")}
    assert len(texts) == 1
    again = CliRunner().invoke(root, ["models", "--folder", str(tmp_path / "x"), "random", "a"])
    assert (again.exit_code, "there already" in again.output) == (1, True)


def test_gateways_read_its_tokenizer_and_its_chat_template(tiny_models: tuple[Path, Path]) -> None:
    model = read_model(tiny_models[0])
    assert (model.architecture, model.dtype, model.context_tokens, model.vocabulary_size) == ("LlamaForCausalLM", "float32", 2048, 2048)
    text = open_text(model.tokenizer, model.chat_template)
    chat = ChatPrompt(messages=({"role": "user", "content": "naïve question?"},))
    rendered = "<|im_start|>user\nnaïve question?<|im_end|>\n<|im_start|>assistant\n"
    ids = text.encode_chat(chat)
    assert ids is not None
    assert ids == text.encode_text(rendered, control_tokens=True)
    assert (ids[0], max(ids) < model.vocabulary_size) == (1, True)
    assert text.detokenizer(()).feed(ids[1:5]) in rendered


def test_smollm2_answers_sensibly(tmp_path: Path) -> None:
    result = CliRunner().invoke(root, ["models", "--folder", str(tmp_path), "add", "smollm2"])
    if result.exit_code == 1 and "pip cannot download" in result.output:
        pytest.skip(result.output)
    assert result.exit_code == 0, result.output
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0][ids["input_ids"].shape[1] :])
