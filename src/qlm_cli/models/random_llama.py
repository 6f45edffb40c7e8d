"""Tiny Llamas with random weights and a real tokenizer: what they say is nonsense, and always the same nonsense.

The tokenizer is a byte-level BPE, learned from the help texts that ship with Python. Weights are drawn so wide that greedy output is
varied. The same seed gives the same bytes with the same versions of Python and PyTorch, which are imported when a model is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qlm_cli.models.model_folder import CHAT_TEMPLATE_FILE, written_whole

CONTEXT_TOKENS = 2048
VOCABULARY_SIZE = 2048
CORPUS_CHARACTERS = 200_000
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_random_model(folder: Path, *, seed: int, context_tokens: int = CONTEXT_TOKENS) -> None:
    """Writes a model of 1.3M parameters (float32) in the Hugging Face layout to `folder`, which must not be there or be empty."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(context_tokens)
    end_id, text_end_id = tokenizer.convert_tokens_to_ids(TURN_END), tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=text_end_id,
        eos_token_id=end_id,
        pad_token_id=text_end_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=text_end_id, eos_token_id=end_id, pad_token_id=text_end_id)
    with written_whole(folder) as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / CHAT_TEMPLATE_FILE).write_text(CHAT_TEMPLATE, encoding="utf-8")


def _tokenizer(context_tokens: int) -> Any:
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = "\n".join(topics[name] for name in sorted(topics))[:CORPUS_CHARACTERS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context_tokens,
    )
