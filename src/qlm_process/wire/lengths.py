"""Length guesses and the length model between the wire (request.proto, estimator.proto) and `qlm_core.statistics.length_model`."""

from __future__ import annotations

from qlm.api.v1 import estimator_pb2, request_pb2
from qlm.field_copies import message_of, value_of
from qlm_core.statistics.length_model import LengthGuess, LengthModel, LengthScore


def guess_to_proto(guess: LengthGuess) -> request_pb2.LengthGuess:
    return request_pb2.LengthGuess(  # by hand, as its inverse: every request passes here
        median_tokens=guess.median_tokens,
        model_tokens=guess.model_tokens,
        expected_tokens=guess.expected_tokens,
        by_model=guess.by_model,
        hint_tokens=guess.hint_tokens,
        features=guess.features,
        hint_feature=guess.hint_feature,
    )


def guess_from_proto(message: request_pb2.LengthGuess) -> LengthGuess:
    """Raises ValueError for figures that no gateway writes."""
    return LengthGuess(
        median_tokens=message.median_tokens,
        model_tokens=message.model_tokens,
        expected_tokens=message.expected_tokens,
        by_model=message.by_model,
        hint_tokens=message.hint_tokens,
        features=tuple(message.features),
        hint_feature=message.hint_feature,
    )


def predicted_output_tokens(admission: request_pb2.Admission) -> int:
    """The output that the length model predicted for a stored request; 0 where it was not in use."""
    guess = admission.length_guess
    return guess.expected_tokens if guess.by_model else 0


def model_to_proto(model: LengthModel) -> estimator_pb2.LengthModel:
    return message_of(estimator_pb2.LengthModel, model, scores=[message_of(estimator_pb2.LengthScore, score) for score in model.scores])


def model_from_proto(message: estimator_pb2.LengthModel) -> LengthModel:
    """Raises ValueError for figures that no estimator writes."""
    return value_of(LengthModel, message, scores=tuple(value_of(LengthScore, score) for score in message.scores))
