"""Serving instances as decisions see them."""

from __future__ import annotations

from dataclasses import dataclass, replace

BATCH_MAX_DEFAULT = 256
"""Most sequences of a batch where nobody says otherwise: vLLM's default of `max_num_seqs`."""

PREFILL_CHUNK_TOKENS = 2_048
"""Prompt tokens that one step of an engine takes in: vLLM's default of `max_num_batched_tokens` with chunked prefill."""

TIME_SCALE_MIN, TIME_SCALE_MAX = 1e-6, 1e6
"""With any in between all times of a profile stay within their bounds."""

UNASSIGNED = "unassigned"
"""The virtual queue of groups that no instance can serve now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """One serving engine slot. `time_scale`: how many times faster than its profile a simulated engine runs; 1 for real ones.
    `batch_max`: most sequences that its engine decodes at once. `active_model`: served, or being loaded, since `loading_since_s` of the
    queue's clock (0: it is loaded). `warm_models`: weights in host memory. `batch`: most requests of the active model that it runs at once,
    as its agent chose last; 0 where it chose none. `started_s`: when its process started, by the queue's clock; 0: not known.
    `lookahead_requests`: most that wait inside its engine."""

    name: str
    incarnation: str
    gpu: str
    n_gpu: int
    engine: str
    models: tuple[str, ...]
    address: str = ""
    time_scale: float = 1.0
    draining: bool = False
    active_model: str = ""
    batch_max: int = BATCH_MAX_DEFAULT
    warm_models: tuple[str, ...] = ()
    loading_since_s: float = 0.0
    batch: int = 0
    started_s: float = 0.0
    lookahead_requests: int = 0

    @property
    def lasting(self) -> InstanceFacts:
        """Without what changes while it serves: where its models are, and the batch."""
        return replace(self, active_model="", warm_models=(), loading_since_s=0.0, batch=0)

    def batch_of(self, model: str) -> int:
        """Most requests of a model that it runs at once."""
        return min(self.batch, self.batch_max) if self.batch and model == self.active_model else self.batch_max


def instance_of(incarnation: str) -> str:
    """The instance of an incarnation "<instance>/<fence>"."""
    return incarnation.rpartition("/")[0]
