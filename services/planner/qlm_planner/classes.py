"""Classes of requests by their tokens, learned by k-means (QLM algorithm 1, step 1): what a class is, and how a request finds its own.

Features are logarithms of prompt tokens and of expected output tokens. A classifier is one version of all classes; it never changes.
Classifying costs at most `CLASSES_MAX` distances.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.cluster.vq import kmeans, vq

from qlm_core.group import LEARNED, GroupKey
from qlm_planner.tenants import BETWEEN

CLASSES_MAX = 8
"""Most classes of a family."""

SPREAD_MAX = math.log(1.25)
"""Classes are added until the root mean square of the distances to their centres is below this: tokens within a factor of 1.25 (ADR 16)."""

FAMILIES_MAX = 64
"""Families that samples are kept of; the one that had none for longest is forgotten."""

SAMPLES_MAX = 1_000
"""Requests that a family's classes are learned from: its last ones."""

SAMPLES_MIN = 50
"""With fewer of them a family has no learned classes."""

SAME_WITHIN = math.log(1.25)
"""A class whose centre moved by less is the same class."""

TOKENS_MAX = 1e9
"""More are taken as so many."""

Family = tuple[str, str, str, str]
"""(model, SLO kind, SLO class, tenant weight class): what classes are learned inside of."""

Sample = tuple[float, float, str]
"""(log of the prompt tokens, log of the expected output tokens, token class) of a request."""


def family_of(key: GroupKey) -> Family:
    return (key.model, key.slo_kind.value, key.slo_class, key.tenant_class.partition(BETWEEN)[0])


def sample_of(prompt_tokens: float, expected_output_tokens: float, token_class: str) -> Sample:
    """Absurd and missing counts are taken as the nearest possible ones."""
    return (_log(prompt_tokens), _log(expected_output_tokens), token_class)


def _log(tokens: float) -> float:
    return math.log(min(TOKENS_MAX, max(1.0, tokens))) if not math.isnan(tokens) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Centre:
    """Of one class. `token_class`: that of most of its requests, by which its groups are estimated. `name`: of its cluster."""

    log_prompt: float
    log_output: float
    token_class: str
    name: str = ""

    def distance(self, sample: Sample) -> float:
        return (self.log_prompt - sample[0]) ** 2 + (self.log_output - sample[1]) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """All classes as they were learned together."""

    version: str = ""
    families: Mapping[Family, tuple[Centre, ...]] = field(default_factory=dict)

    def cluster(self, family: Family, sample: Sample) -> tuple[str, str]:
        """The name of a request's class and its token class; ("", its own) where nothing was learned of its family."""
        centres = self.families.get(family)
        if not centres:
            return "", sample[2]
        nearest = min(centres, key=lambda centre: centre.distance(sample))
        return nearest.name, nearest.token_class

    def renewed(self, version: str, families: Mapping[Family, tuple[Centre, ...]]) -> Classifier:
        """The next version, which names its classes. One that is where a class was before keeps its name, so that its open groups are
        filled up; the others have names of their own."""
        return Classifier(version=version, families={family: self._named(version, family, found) for family, found in families.items()})

    def _named(self, version: str, family: Family, found: Sequence[Centre]) -> tuple[Centre, ...]:
        old = list(self.families.get(family, ()))
        named: list[Centre] = []
        for number, centre in enumerate(found):
            place = (centre.log_prompt, centre.log_output, "")
            same = min(old, key=lambda each: each.distance(place), default=None)
            if same is not None and same.distance(place) <= SAME_WITHIN**2:
                old.remove(same)
                named.append(replace(centre, name=same.name))
            else:
                named.append(replace(centre, name=f"{LEARNED}{version}.{number}"))
        return tuple(named)


@dataclass(slots=True)
class Samples:
    """The last requests of each family. Bounded by `FAMILIES_MAX` x `SAMPLES_MAX`."""

    by_family: dict[Family, deque[Sample]] = field(default_factory=dict)

    def add(self, family: Family, sample: Sample) -> None:
        kept = self.by_family.pop(family, None)
        if kept is None:
            if len(self.by_family) >= FAMILIES_MAX:
                del self.by_family[next(iter(self.by_family))]
            kept = deque(maxlen=SAMPLES_MAX)
        kept.append(sample)
        self.by_family[family] = kept  # the last in order is the newest

    def enough(self) -> dict[Family, tuple[Sample, ...]]:
        """The families that classes can be learned for."""
        return {family: tuple(kept) for family, kept in sorted(self.by_family.items()) if len(kept) >= SAMPLES_MIN}


def usual_token_class(samples: list[Sample]) -> str:
    """The most frequent one; of equally frequent ones the first by name."""
    counts = Counter(sample[2] for sample in samples)
    return min(counts, key=lambda name: (-counts[name], name))


# Learning -------------------------------------------------------------------------------------------------------------


def learn(samples: Mapping[Family, Sequence[Sample]]) -> dict[Family, tuple[Centre, ...]]:
    """Centres of each family, by their place: the same for the same samples."""
    return {family: centres(found) for family, found in samples.items() if found}


def centres(samples: Sequence[Sample]) -> tuple[Centre, ...]:
    """Classes until they are narrow enough, at most `CLASSES_MAX`. Each new one begins at the request farthest from its centre, so there is
    no chance in it."""
    points = np.array([sample[:2] for sample in samples])
    middles = points.mean(axis=0, keepdims=True)
    labels, distances = vq(points, middles)
    for _ in range(CLASSES_MAX - 1):
        if math.sqrt(float((distances**2).mean())) <= SPREAD_MAX:
            break
        middles, _ = kmeans(points, np.vstack((middles, points[distances.argmax()])))
        labels, distances = vq(points, middles)
    found = [
        Centre(
            log_prompt=float(middle[0]),
            log_output=float(middle[1]),
            token_class=usual_token_class([samples[at] for at in np.flatnonzero(labels == number).tolist()]),
        )
        for number, middle in enumerate(middles)
        if (labels == number).any()
    ]
    return tuple(sorted(found, key=lambda centre: (centre.log_prompt, centre.log_output)))
