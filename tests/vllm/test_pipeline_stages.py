"""The stages of a device map on a real model, as `benchmarks evaluate --paper uellm --only pipeline` times them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.evaluate.pipeline_stages import DEVICES, PROMPT, Layers, StagedModel

TOKENS = 6


def test_two_unequal_stages_decode_as_the_whole_model(tiny_models: tuple[Path, Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    whole: Layers = ((DEVICES[0], 4),)
    split: Layers = ((DEVICES[0], 1), (DEVICES[0], 3))
    found = StagedModel(tiny_models[0]).decode([whole, split], TOKENS)
    reference = AutoModelForCausalLM.from_pretrained(tiny_models[0], dtype=torch.float32)
    expected = reference.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)[0, len(PROMPT) :].tolist()
    assert found[split][0] == found[whole][0] == expected
    assert [len(steps_ms) for _, steps_ms in found.values()] == [TOKENS, TOKENS]
