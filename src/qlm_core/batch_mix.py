"""The batch that an engine's requests share: how many sequences decode at once, when classes are mixed as they wait and run.

A class alone says little of it. Short outputs behind long prompts would fill a batch of their own with a few sequences, since prefills keep
the seats empty; between other requests they take a seat of the common batch like everyone. So B, and the cost of a step, are those of the
mix, and a class pays for each of its tokens its own KV reads and its share of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qlm_core.instance import PREFILL_CHUNK_TOKENS
from qlm_core.normal_arrays import Floats
from qlm_core.service_arrays import EngineColumns, Integers, ServiceColumns


@dataclass(frozen=True, slots=True, eq=False)
class BatchMix:
    """Of each engine, arrays [engines], NaN where nothing waits or runs: `batch`: B; `sequence_s`: what a sequence adds to a step;
    `output`: mean output tokens of a request; `joining_s`: prefills that join for each token of a seat."""

    batch: Floats
    sequence_s: Floats
    output: Floats
    joining_s: Floats

    def over(self, older: BatchMix | None, of: Integers) -> BatchMix:
        """This for the engines with numbers `of`, the older one for all others."""
        if older is None:
            return self
        known = len(older.batch)
        keep = np.ones(len(self.batch), dtype=np.bool_)
        keep[of] = False
        keep[known:] = False
        kept = [np.where(keep, np.resize(old, keep.shape), new) for old, new in zip(_fields(older), _fields(self), strict=True)]
        return BatchMix(*kept)


def _fields(mix: BatchMix) -> tuple[Floats, Floats, Floats, Floats]:
    return mix.batch, mix.sequence_s, mix.output, mix.joining_s


def batch_mix(engine: EngineColumns, of: Integers, count: Floats, prompt_tokens: Floats, served: ServiceColumns) -> BatchMix:
    """`count` [classes] requests of each class on the engine with number `of`, each with so many prompt tokens in the mean. Requests take
    a seat for as many steps as they make tokens, so KV is shared by these; prefills by requests."""
    engines = len(engine.batch_max)

    def summed(value: Floats) -> Floats:
        return np.bincount(of, weights=count * value, minlength=engines).astype(np.float64)

    requests, tokens = summed(np.ones_like(prompt_tokens)), summed(served.output)
    held = summed(served.output * (prompt_tokens + np.maximum(served.left_tokens, served.output)))
    with np.errstate(divide="ignore", invalid="ignore"):
        by_kv = engine.kv_tokens * tokens / held
        by_prefill = PREFILL_CHUNK_TOKENS * tokens / np.maximum(requests, summed(prompt_tokens))
        batch = np.maximum(1.0, np.minimum(np.minimum(engine.batch_max, by_kv), by_prefill))
        sequence = summed(served.output * served.sequence_s) / tokens
        output = tokens / requests
        joining = summed(served.prefill_work_s) / tokens
    return BatchMix(batch=batch, sequence_s=sequence, output=output, joining_s=joining)


def mixed(served: ServiceColumns, of: Integers, mix: BatchMix) -> ServiceColumns:
    """The services of classes in the batches of their engines. `left_tokens` is such that `batch_left_s` of the classes, weighted by
    requests, adds up to the work in flight: a class holds seats in proportion to its outputs."""
    batch, sequence, mean = mix.batch[of], mix.sequence_s[of], mix.output[of]
    known = np.isfinite(batch)
    batch = np.where(known, batch, served.batch)
    sequence = np.where(known, sequence, served.sequence_s)
    weight = np.where(known, served.output / mean, 1.0)
    step = served.step_base_s + sequence * batch
    token = served.step_base_s / batch + served.sequence_s
    return replace(
        served,
        batch=batch,
        step_s=step,
        token_s=token,
        left_tokens=served.left_tokens * weight * token * batch / step,
        sequence_s=sequence,
        joining_s=np.where(known, mix.joining_s[of], served.joining_s),
    )
