"""From QLM's sampling parameters to keyword arguments of vllm.SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from qlm_agent.engines.port import Sampling

MODEL_DEFAULTS = ("temperature", "top_p", "repetition_penalty")
"""Parameters that a request may leave to the model's generation_config.json."""


def sampling_document(sampling: Sampling) -> dict[str, Any]:
    """The parameters sent to an engine process: those not left to defaults."""
    plain = asdict(Sampling())
    return {name: value for name, value in asdict(sampling).items() if value != plain[name]}


def vllm_arguments(sampling: Mapping[str, Any], output_tokens: int, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`sampling`: of `sampling_document`; `defaults`: the model's own. Stop strings are excluded (see `stop_strings`). `json_schema` and
    `regex` pass unchanged, for vllm's StructuredOutputsParams."""
    arguments: dict[str, Any] = {name: defaults[name] for name in MODEL_DEFAULTS if name in defaults}
    arguments |= {name: value for name, value in sampling.items() if name not in ("stop", "json_schema", "regex")}
    structured = {name: sampling[key] for name, key in (("json", "json_schema"), ("regex", "regex")) if sampling.get(key)}
    if structured:
        arguments["structured_outputs"] = structured
    return {**arguments, "max_tokens": output_tokens, "detokenize": False}
