"""The batch that an engine's requests share: how many sequences decode at once, when classes are mixed as they wait and run.

A class alone says little of it. Short outputs behind long prompts would fill a batch of their own with a few sequences, since prefills keep
the seats empty; between other requests they take a seat of the common batch like everyone. So B, and the cost of a step, are those of the
mix, and a class pays for each of its tokens its own KV reads and its share of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from qlm_core.prediction.prediction_service import EngineColumns, Integers, ServiceColumns, reserved_tokens
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.vocabulary.instance import PREFILL_CHUNK_TOKENS

STEPS_MIN = 8.0
"""Mean outputs that a batch lasts at the least: more arrive while it runs."""
LONG = 8.0
"""Mean outputs from which on a request is a long one: few of them are in a batch, and they stay while many batches pass, so that at any
time there are some of those of the whole queue."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchMix:
    """Batches of engines, arrays [engines], NaN where nothing waits or runs: `batch`: B; `sequence_s`: what a sequence adds to a step;
    `output`: mean output tokens of a request; `joining_s`: prefills that join for each token of a seat; `long_left_s`: decode
    work that long requests have in flight at any time, for each seat; `made_max`: most tokens that one has made on average, for as
    long as the queue lasts; `context_token_s`: what each of them adds to a step."""

    batch: Floats
    sequence_s: Floats
    output: Floats
    joining_s: Floats
    long_left_s: Floats
    made_max: Floats
    context_token_s: Floats

    def over(self, older: BatchMix | None, of: Integers) -> BatchMix:
        """This for the engines with numbers `of`, the older one for all others."""
        if older is None:
            return self
        known = len(older.batch)
        keep = np.ones(len(self.batch), dtype=np.bool_)
        keep[of] = False
        keep[known:] = False
        pairs = ((getattr(older, name), getattr(self, name)) for name in BatchMix.__slots__)
        return BatchMix(*(np.where(keep, np.resize(old, keep.shape), new) for old, new in pairs))


def batch_mix(engine: EngineColumns, of: Integers, count: Floats, prompt_tokens: Floats, served: ServiceColumns) -> BatchMix:
    """`count` [classes] requests of each class on the engine with number `of`, each with so many prompt tokens on average. Requests take
    a seat for as many steps as they make tokens, so KV is shared by these; prefills by requests. One that decodes holds its prompt and
    what agents reserve. One that is longer than all others together is beside them only until they are done."""
    engines = len(engine.batch_max)

    def summed(value: Floats) -> Floats:
        return np.bincount(of, weights=count * value, minlength=engines).astype(np.float64)

    requests, tokens = summed(np.ones_like(prompt_tokens)), summed(served.output)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.maximum(tokens / engine.batch_max, STEPS_MIN * tokens / requests)
        made = np.minimum(served.output, steps[of])
        output, whole = tokens / requests, tokens
        tokens = summed(made)
        reserved = reserved_tokens(served.output, served.output_variance, output[of])
        held = summed(made * (prompt_tokens + np.minimum(reserved, steps[of])))
        by_kv = (engine.kv_tokens - 0.5 * (summed(prompt_tokens) / requests + output)) * tokens / held
        by_prefill = PREFILL_CHUNK_TOKENS * tokens / np.maximum(requests, summed(served.prefill_tokens))
        batch = np.maximum(1.0, np.minimum(np.minimum(engine.batch_max, by_kv), by_prefill))
        own = _sequence_s(served, 0.5 * steps[of], engine.context_token_s[of])
        sequence = summed(made * own) / tokens
        joining = summed(served.prefill_work_s) / tokens
        # Work of a memoryless request, until the last of the others has ended.
        left = served.left_tokens * -np.expm1(-whole[of] / (engine.batch_max[of] * served.left_tokens))
        left_s = served.output * left * (served.step_base_s / batch[of] + own)
        long_left = summed(np.where(_long(served, output[of]), left_s, 0.0)) / whole
    return BatchMix(
        batch=batch,
        sequence_s=sequence,
        output=output,
        joining_s=joining,
        long_left_s=long_left,
        made_max=0.5 * steps,
        context_token_s=engine.context_token_s,
    )


def _sequence_s(served: ServiceColumns, made_max: Floats, context_token_s: Floats) -> Floats:
    """Seconds that a sequence of each class adds to a step, where none has produced more than so much on average."""
    found: Floats = served.sequence_s - context_token_s * np.maximum(served.left_tokens - made_max, 0.0)
    return found


def _long(served: ServiceColumns, mean: Floats) -> NDArray[np.bool_]:
    return served.output > LONG * mean


def mixed(served: ServiceColumns, of: Integers, mix: BatchMix) -> ServiceColumns:
    """The services of classes in the batches of their engines. `left_tokens` is such that `batch_left_s` of the classes, weighted by
    requests, adds up to the work in flight: a class holds seats in proportion to its outputs. Seats of long ones, each taken to be
    memoryless for as long as the queue lasts, is spread over all. On an engine that the mix does not have, or that has none, a class is
    alone."""
    inside = of < len(mix.batch)
    of = np.where(inside, of, 0)
    batch, sequence, mean = mix.batch[of], mix.sequence_s[of], mix.output[of]
    known = inside & np.isfinite(batch)
    batch = np.where(known, batch, served.batch)
    sequence = np.where(known, sequence, served.sequence_s)
    weight = np.where(known, np.where(_long(served, mean), 0.0, served.output / mean), 1.0)
    step = served.step_base_s + sequence * batch
    own = np.where(known, _sequence_s(served, mix.made_max[of], mix.context_token_s[of]), served.sequence_s)
    token = served.step_base_s / batch + own
    return replace(
        served,
        batch=batch,
        step_s=step,
        token_s=token,
        left_tokens=(served.left_tokens * weight * token + np.where(known, mix.long_left_s[of], 0.0)) * batch / step,
        sequence_s=sequence,
        joining_s=np.where(known, mix.joining_s[of], served.joining_s),
    )
