"""Requests of a simulated workload, and the messages that clients send for them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from qlm.api.v1 import request_pb2
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import RequestKey, Slo, SloKind
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, answer_tokens, prompt_digest
from qlm_process.wire.slo import SLO_KIND_NUMBERS


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """`arrival_s`: seconds after the start at which its client sends it. `output_tokens`: length of its answer, which the prompt sets for a
    simulated model; `output_tokens_max`: the client's limit, 0 for none. `content`: requests of other content have other prompts, and so
    other answers. `resumable`: its sampling can be continued after an abort (else it names a seed, which a simulated model ignores).
    `greedy`: it sets temperature 0, which a simulated model ignores and length predictions use."""

    request_id: str
    arrival_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    tenant: str = "default"
    expire_after_s: float | None = None
    content: int = 0
    output_tokens_max: int = 0
    resumable: bool = True
    greedy: bool = False

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.tenant, self.request_id)


def prompt_ids(request: SimRequest, spec: ModelSpec) -> list[int]:
    """Random tokens by content, and last the one that sets `output_tokens`."""
    content = prompt_digest(request.tenant + request.request_id, [request.content])
    packed = answer_tokens(content, 0, request.prompt_tokens - 1, spec.vocabulary_size)
    return [*np.frombuffer(packed, dtype="<u4").tolist(), LENGTH_TOKEN_BASE + request.output_tokens]


def answer(request: SimRequest, spec: ModelSpec) -> array[int]:
    """A simulated model's answer, undisturbed or not: a function of model and prompt alone."""
    packed = answer_tokens(prompt_digest(spec.name, prompt_ids(request, spec)), 0, request.output_tokens, spec.vocabulary_size)
    return array("I", np.frombuffer(packed, dtype="<u4").astype(np.uint32).tobytes())


def message(request: SimRequest, spec: ModelSpec) -> request_pb2.Request:
    slo = request_pb2.Slo(kind=SLO_KIND_NUMBERS[request.slo.kind])
    if request.slo.kind is SloKind.PRIORITY:
        slo.priority = request.slo.priority
    else:
        slo.seconds = request.slo.seconds
    sent = request_pb2.Request(
        model=request.model,
        slo=slo,
        tenant=request.tenant,
        request_id=request.request_id,
        expire_after_s=request.expire_after_s,
        sampling=_sampling(request),
    )
    sent.tokens.ids.extend(prompt_ids(request, spec))
    return sent


def _sampling(request: SimRequest) -> request_pb2.SamplingParams | None:
    if request.resumable and not request.output_tokens_max and not request.greedy:
        return None
    return request_pb2.SamplingParams(
        max_tokens=request.output_tokens_max,
        temperature=0.0 if request.greedy else None,
        seed=None if request.resumable else 1,
    )
