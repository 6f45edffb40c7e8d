"""When a request that has made some of its output will end, in the batch that it runs in (QLM equation 4), and the output that is left."""

from __future__ import annotations

from collections.abc import Mapping

from qlm_core.prediction.prediction_service import service
from qlm_core.prediction.prediction_views import GroupView, QueueView, RequestPrediction
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.model import ModelSpec


def predict_running(
    view: QueueView, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot, request: GroupView, produced_tokens: int
) -> RequestPrediction | None:
    """`request`: as a group of one; `produced_tokens`: its output so far, 0 before its first token. None without a profile of its model on
    this instance. One whose KV is in host memory ends later than this: from outside it runs. Raises ValueError for a negative output."""
    spec = catalogue.get(request.model)
    hardware = None if spec is None else profiles.hardware_for(view.instance, spec)
    if hardware is None:
        return None
    key = (request.model, request.slo_class, request.token_class)
    workload, batch_max = profiles.workload_for(*key), view.instance.batch_max
    share = workload.uncached_share
    served = service(request.waiting_prompt_tokens, workload.output_tokens, hardware, batch_max, uncached_share=share)
    left = output_left(profiles, request, produced_tokens)
    behind = sum(group.waiting for group in view.groups if group.model == request.model)
    decode = served.decode(view.running, behind, left)
    return RequestPrediction(
        instance=view.instance.name,
        wait=Normal.point(0.0),
        completion=decode if produced_tokens else decode.shifted(served.prefill_s),
        requests_ahead=0,
        profile_version=profiles.version,
        prefill_s=0.0 if produced_tokens else served.prefill_s,
    )


def output_left(profiles: ProfileSnapshot, request: GroupView, produced_tokens: int) -> Normal:
    """Output tokens that a request still makes, by its class and its limit, having made so many: at least one. Raises ValueError for a
    negative output."""
    room_tokens = max(1.0, request.output_tokens_max - produced_tokens)
    curve = profiles.output_curve_for(request.model, request.slo_class, request.token_class)
    return _between(curve.left(float(produced_tokens), room_tokens), 1.0, room_tokens)


def _between(tokens: Normal, low: float, high: float) -> Normal:
    """Bounds mean and variance of a value between two bounds: the mean lies there, the variance is of at most a quarter of their distance
    squared (Popoviciu)."""
    return Normal(min(max(tokens.mean, low), high), min(tokens.variance, (high - low) ** 2 / 4.0))
