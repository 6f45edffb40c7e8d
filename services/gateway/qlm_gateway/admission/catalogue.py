"""The models that a gateway admits requests for, as admission sees them."""

from __future__ import annotations

from dataclasses import dataclass

from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.simulated_model import ANSWER_TOKENS_MAX, BYTES_PER_TEXT_TOKEN, LENGTH_TOKEN_BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A served model. `exact`: prompts are counted with its own tokenizer; else it is a simulated model and they are approximated.
    `token_bytes_max`: the most UTF-8 bytes of prompt that one token can stand for."""

    spec: ModelSpec
    exact: bool = False
    token_bytes_max: int = BYTES_PER_TEXT_TOKEN

    def admits_token(self, token_id: int) -> bool:
        """Whether a prompt may hold this id: of the vocabulary or, for simulated models, one that states the answer's length."""
        if token_id < self.spec.vocabulary_size:
            return True
        return not self.exact and LENGTH_TOKEN_BASE <= token_id <= LENGTH_TOKEN_BASE + ANSWER_TOKENS_MAX
