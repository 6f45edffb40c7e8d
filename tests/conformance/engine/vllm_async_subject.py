"""The vllm engine through AsyncLLM."""

from __future__ import annotations

from .subjects import Kind
from .vllm_subject import ALL, VllmSubject


class VllmAsyncSubject(VllmSubject):
    """The same models and limits; vLLM's scheduler is a process further away."""

    runner = "async"


SUBJECTS = {"vllm-async": Kind(VllmAsyncSubject, ALL)}
