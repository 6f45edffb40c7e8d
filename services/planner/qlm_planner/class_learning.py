"""Learns classes of requests by k-means, from samples. Takes up to seconds: the shell runs it beside the planner's decisions.

scikit-learn is loaded here alone, when something is learned for the first time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qlm_planner.classes import CLASSES_MAX, Centre, Family, Sample, usual_token_class
from qlm_planner.effects import LearnClasses
from qlm_planner.events import ClassesFailed, ClassesLearned

SPREAD_MAX = math.log(1.25)
"""Classes are added until the root mean square of the distances to their centres is below this: tokens within a factor of 1.25 (ADR 16)."""

STARTS = 3
"""Runs of k-means from other beginnings; the best counts."""

SEED = 1


def learned(call: LearnClasses) -> ClassesLearned | ClassesFailed:
    """Carries out one call. Whatever goes wrong is an answer too: the planner goes on with the classes that it has."""
    try:
        return ClassesLearned(number=call.number, families=learn(call.samples))
    except Exception as error:  # the planner needs no learned classes: nothing here may end its term
        return ClassesFailed(number=call.number, why=f"{type(error).__name__}: {error}")


def learn(samples: Mapping[Family, Sequence[Sample]]) -> dict[Family, tuple[Centre, ...]]:
    """Centres of each family, by their place: the same for the same samples."""
    return {family: centres(found) for family, found in samples.items() if found}


def centres(samples: Sequence[Sample]) -> tuple[Centre, ...]:
    """The fewest classes that are narrow enough, at most `CLASSES_MAX`; one for requests that are all alike."""
    points = np.array([sample[:2] for sample in samples])
    if not np.isfinite(points).all():
        raise ValueError("samples must be finite")
    most = min(CLASSES_MAX, len(np.unique(points, axis=0)))
    middles, labels = points.mean(axis=0, keepdims=True), np.zeros(len(points), dtype=np.int64)
    count = 1
    while count < most and _spread(points, middles, labels) > SPREAD_MAX:
        count += 1
        middles, labels = _k_means(points, count)
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


def _spread(points: NDArray[np.float64], middles: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    return math.sqrt(float(((points - middles[labels]) ** 2).sum(axis=1).mean()))


def _k_means(points: NDArray[np.float64], count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    # One thread: sums in another order would be other sums.
    with threadpool_limits(limits=1):
        found = KMeans(n_clusters=count, n_init=STARTS, random_state=SEED, algorithm="lloyd").fit(points)
    return found.cluster_centers_, found.labels_.astype(np.int64)
