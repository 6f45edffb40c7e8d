"""The vllm engine with asynchronous scheduling, which vLLM has on GPUs only."""

from __future__ import annotations

from .subjects import Kind
from .vllm_subject import ALL, VllmSubject


class VllmAsyncSubject(VllmSubject):
    """The same models and limits; a step is scheduled while the one before is under way."""

    async_scheduling = True


SUBJECTS = {"vllm-async": Kind(VllmAsyncSubject, ALL)}
