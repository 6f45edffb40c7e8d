"""Learns classes of requests by k-means, from samples: tens of milliseconds a family, so the shell runs it in a thread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.cluster.vq import kmeans, vq

from qlm_planner.classes import CLASSES_MAX, Centre, Family, Sample, usual_token_class
from qlm_planner.effects import LearnClasses
from qlm_planner.events import ClassesLearned

SPREAD_MAX = math.log(1.25)
"""Classes are added until the root mean square of the distances to their centres is below this: tokens within a factor of 1.25 (ADR 16)."""


def learned(call: LearnClasses) -> ClassesLearned:
    """Carries out one call."""
    return ClassesLearned(number=call.number, families=learn(call.samples))


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
