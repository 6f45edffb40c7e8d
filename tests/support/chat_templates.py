"""Small chat templates, one of each shape that published models have, and tokenizers of their kinds with the control tokens that they
write."""

# ruff: noqa: E501, RUF001 (templates as they are published)

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "system user assistant tool\n\n",
    "{'name': 1, \"a\": [0.5, true]} <>|/_[] é😀",
] * 20

CONTROLS = (
    "<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "[INST]", "[/INST]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<bos>", "<eos>", "<start_of_turn>",
    "<end_of_turn>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|channel|>", "<|message|>",
    "<|start|>", "[gMASK]", "<sop>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<｜User｜>", "<｜Assistant｜>", "<table>", "\n\n", "    ")
"""Added tokens that are not special ones, as some models have."""

TEMPLATES: Mapping[str, str] = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "chatml with a default system": "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + m['role'] + '\n' + m['content']}}"
    "{% if (loop.last and add_generation_prompt) or not loop.last %}{{ '<|im_end|>' + '\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama 2": "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for m in rest %}"
    "{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}"
    "{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
    "llama 3": "{% for m in messages %}{% set content = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'+ m['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "llama 3 with a date": "{{- bos_token }}\n{%- if not date_string is defined %}\n{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%Y-%m') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '<|eot_id|>' }}\n{%- for m in messages %}\n"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\n{%- endif %}\n",
    "mistral that wants turns": "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}",
    "mistral with tools": "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools and loop.last %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls is defined and m.tool_calls %}{{ '[TOOL_CALLS] ' + (m.tool_calls | tojson) + eos_token }}"
    "{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + ({'content': m.content} | tojson) + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{ ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}",
    "zephyr": "{% for m in messages %}\n{% if m['role'] == 'user' %}\n{{ '<|user|>\n' + m['content'] + eos_token }}\n"
    "{% elif m['role'] == 'system' %}\n{{ '<|system|>\n' + m['content'] + eos_token }}\n{% elif m['role'] == 'assistant' %}\n"
    "{{ '<|assistant|>\n'  + m['content'] + eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n"
    "{% endif %}\n{% endfor %}",
    "phi, tokens from roles": "{% for m in messages %}{{ '<|' + m['role'] + '|>' + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = m['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
    "command": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m['content']"
    ".strip() + '<|END_OF_TURN_TOKEN|>' }}{% else %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + m['content'].strip() +"
    " '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
    "qwen with tools": "{%- if tools %}\n{{- '<|im_start|>system\n# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}"
    "{%- endfor %}{{- '\n</tools><|im_end|>\n' }}\n{%- endif %}{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}{%- else %}"
    "{{- '<|im_start|>' + m.role }}{%- if m.content %}{{- '\n' + m.content }}{%- endif %}{%- for call in m.tool_calls or [] %}"
    "{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}"
    '{{- \'\n<tool_call>\n{"name": "\' }}{{- call.name }}{{- \'", "arguments": \' }}{{- call.arguments | tojson }}{{- \'}\n</tool_call>\' }}'
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}",
    "qwen that drops thoughts": "{%- set ns = namespace(last=messages|length - 1) %}{%- for m in messages[::-1] %}"
    "{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- break %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- set content = m.content %}{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}{%- endif %}",
    "deepseek": "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(system='') %}{%- for m in messages %}{%- if m['role'] == 'system' %}{% set ns.system = m['content'] %}{%- endif %}"
    "{%- endfor %}{{ bos_token }}{{ ns.system }}{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{%- elif m['role'] == 'assistant' %}{% set content = m['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    "marks of generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = 'x' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{% set content = m.content %}{{ content + '<|im_end|>' }}{% endgeneration %}{{ content + '\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "loop controls": "{{ bos_token }}{% for m in messages %}{% if not m.content %}{% continue %}{% endif %}{% if loop.index0 > 4 %}{% break %}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    "macros": "{% macro turn(role, content) %}<|start|>{{ role }}<|message|>{{ content }}<|end|>{% endmacro %}"
    "{%- for m in messages %}{{ turn(m.role, m.content) }}{%- endfor %}{%- if add_generation_prompt %}<|start|>assistant{%- endif %}",
    "channels": "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{%- endif %}",
    "glm, as text": "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "vicuna, plain words": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}{% elif m.role == 'user' %}"
    "{{ 'USER: ' + m.content + '\n' }}{% else %}{{ 'ASSISTANT: ' + m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "alpaca, with blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\n### Instruction:\n{{ m.content|trim -}}\n    {% else %}\n"
    "### Response:\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n{%- if add_generation_prompt %}\n\n### Response:\n{% endif %}",
    "json in all ways": "{{ bos_token }}{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=true) }}"
    "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ eos_token }}",
    "all special tokens": "{{ bos_token }}{{ unk_token }}{{ pad_token }}{{ cls_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "documents and variables": "{{ bos_token }}{% for d in documents or [] %}[{{ d.title }}] {{ d.text }}\n{% endfor %}{% if reasoning is defined %}"
    "{{ 'reasoning: ' ~ reasoning ~ '\n' }}{% endif %}{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}",
    "names and parts": "{% for m in messages %}{{ '<|im_start|>' ~ m.role }}{% if m.name is defined %}{{ ' name=' + m.name }}{% endif %}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "selected and sliced": "{% set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list %}"
    "{{ system | join('\n') }}{% for m in (messages | rejectattr('role', 'equalto', 'system') | list)[-3:] %}"
    "{{ '<|%s|>' | format(m.role) }}{{ m.content | replace('\r\n', '\n') }}{{ eos_token }}{% endfor %}",
    "numbers of turns": "{% for m in messages %}{{ '[Round %d]' % loop.index }} {{ m.role | capitalize }}: {{ m.content }}</s>{% endfor %}",
    "formats content": "{% for m in messages %}{{ m.content % () }}<|end|>{% endfor %}",
}  # fmt: skip
"""By the family that has the shape."""


def _bytes() -> Tokenizer:
    """As of GPT-2, Llama 3 and Qwen."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*| ?\p{L}+|\s+"), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    return made


def _byte_fallback() -> Tokenizer:
    """As of Llama 2: a blank before each text, also after each control token."""
    letters = sorted({letter for text in CORPUS for letter in text if letter != " "} | {"▁"})
    vocabulary = {
        token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters])
    }
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def _unigram() -> Tokenizer:
    """As of T5 and Gemma 1: control tokens are pieces too, and full-width forms are read as ASCII."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -5.0) for letter in sorted({letter for text in CORPUS for letter in text if letter != " "})]
    pieces += [(word, -3.0) for word in ("▁the", "▁fox", "user", "assistant", "▁dog")]
    made = Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace()
    return made


TOKENIZERS = {"bytes": _bytes, "byte fallback": _byte_fallback, "unigram": _unigram}


def write_model(folder: Path, kind: str, templates: str | Sequence[Mapping[str, str]], *, normalized: bool = False) -> str:
    """A model's text files in the Hugging Face layout; returns the path of its tokenizer.json. `normalized`: control tokens are found in text
    as its normalizer leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = TOKENIZERS[kind]()
    made.add_special_tokens([AddedToken(token, special=True, normalized=normalized) for token in CONTROLS])
    made.add_tokens([AddedToken(token, normalized=True) for token in PLAIN_ADDED])
    made.enable_truncation(5)  # as some are published
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {
            "__type": "AddedToken",
            "content": "<s>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        },
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": None,
        "chat_template": templates,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder / "tokenizer.json")
