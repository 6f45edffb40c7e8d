"""Predicts the length of a request's output at its acceptance, by the newest profiles. Pure, and in process: no request waits for it."""

from __future__ import annotations

from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.length_features import LengthFacts, hashes_of_text, hashes_of_tokens
from qlm_core.statistics.length_model import LengthGuess
from qlm_core.vocabulary.group import prompt_class, slo_class
from qlm_gateway.admission.drafts import RequestDraft, SamplingDraft
from qlm_gateway.admission.rules import Admitted
from qlm_gateway.text.prompts import PreparedPrompt


def guess_length(draft: RequestDraft, admitted: Admitted, prompt: PreparedPrompt, profiles: ProfileSnapshot) -> LengthGuess:
    """The median of the request's group, or what the length model says where that is in use."""
    facts = LengthFacts(
        model=draft.model,
        tenant=admitted.key.tenant,
        application=draft.application,
        prompt_tokens=admitted.prompt_tokens,
        output_tokens_limit=draft.sampling.max_tokens if draft.sampling is not None else 0,
        prompt_hashes=hashes_of_tokens(prompt.token_ids) if prompt.token_ids is not None else hashes_of_text(prompt.text or ""),
        sampling=_word(draft.sampling),
        hint_tokens=draft.expected_output_tokens,
    )
    curve = profiles.output_curve_for(draft.model, slo_class(admitted.slo), prompt_class(admitted.prompt_tokens))
    return profiles.length_model.guess(facts, curve.median_tokens, admitted.output_tokens_max)


def _word(sampling: SamplingDraft | None) -> str:
    """Names the sampling options that bear on the length of an answer; "" for the defaults."""
    if sampling is None:
        return ""
    parts = (
        ("greedy", sampling.temperature == 0.0),
        ("structured", sampling.json_schema is not None or sampling.regex is not None),
        ("stop", bool(sampling.stop)),
    )
    return "-".join(name for name, there in parts if there)
