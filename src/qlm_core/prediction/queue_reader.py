"""From what is known of virtual queues (`QueueView`) to columns, on one profile snapshot.

Each group is one column: its counts, its class's service on its engine and what a swap to its model takes. The columns of many queues are
worked out in one go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from qlm_core.operations.clearing import EvictionCosts, eviction_costs
from qlm_core.prediction.batch_mix import BatchMix, batch_mix, mixed
from qlm_core.prediction.prediction_service import EngineColumns, ServiceColumns, ServiceFigures, longest_of_each, service, services
from qlm_core.prediction.prediction_views import GroupView, QueueView, RunningView
from qlm_core.prediction.queue_columns import (
    BAND,
    COUNT,
    DEADLINE,
    ENGINE,
    LEAD_DRAIN,
    LEAD_DRAIN_VARIANCE,
    LEAD_HELD,
    LEAD_LOADING,
    LEAD_MODEL,
    LEAD_ROWS,
    LONGEST_OUTPUT,
    LONGEST_SCALE,
    MODEL,
    PREFILL_BASE,
    PREFILL_TOKEN,
    ROWS,
    SERVICE,
    SWAP,
    WARM,
    QueueGroups,
)
from qlm_core.prediction.queue_model import DECODE, LEFT, PREFILL, REQUESTS, SEATS, VARIANCE, Integers
from qlm_core.profiles.profile import HardwareProfile, Longest, ProfileSnapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.statistics.length_curve import LONGEST_OF, SHARE_MIN, longest_among, longest_of_counts
from qlm_core.statistics.normal_arrays import Floats
from qlm_core.vocabulary.model import ModelSpec

GROUP_FIGURES = 13
RUNNER_FIGURES = 14
"""Figures of a group and of a class that runs, as they are collected."""

NOT_OF_CLASS = -1.0
"""In place of a class where the caller gives a group's outputs."""

_Engine = tuple[str, int, float, int]
"""Key of an instance's profile beside its name: GPU, how many of it, time scale, batch."""

NewRequest = tuple[QueueView, GroupView]
"""A request on an instance, as a group of one."""


class NoProfile(Exception):
    """Nothing is known of a model on an instance, so nothing is predicted there."""


class QueueReader:
    """Reads views on one snapshot. Keeps the engines and classes that it saw; at most one for each instance and model, and one for each
    class that the snapshot or a view names, so it lives no longer than they do."""

    def __init__(self, catalogue: Mapping[str, ModelSpec], profiles: ProfileSnapshot) -> None:
        self.profiles = profiles
        self._catalogue = catalogue
        self._engines: dict[tuple[str, str], tuple[_Engine, int]] = {}
        self._profiles_of: list[tuple[HardwareProfile, float]] = []
        self._columns: EngineColumns | None = None
        self._classes: dict[tuple[str, str, str, float], tuple[float, float, float, float, float]] = {}
        self._longest: list[Longest] = []  # by the last of the figures of a class
        self._models: dict[str, float] = {"": -1.0}
        self._mix: BatchMix | None = None  # of each engine as it was read last

    def read(self, views: Iterable[QueueView]) -> tuple[list[QueueView], QueueGroups]:
        """The views that can be predicted, and their groups. One with a group whose model has no profile on its instance is left out."""
        kept: list[QueueView] = []
        groups: list[tuple[float, ...]] = []
        runners: list[tuple[float, ...]] = []
        sizes: list[int] = []
        for view in views:
            try:
                own, running = self._view_rows(view, len(kept))
            except NoProfile:
                continue
            kept.append(view)
            groups += own
            runners += running
            sizes.append(len(own))
        return kept, self._made(kept, groups, runners, sizes)

    def request_rows(self, new: Sequence[NewRequest]) -> Floats:
        """[ROWS, requests]. Raises NoProfile."""
        figures = _columns([self._group_row(self._engine_row(view, group.model), group) for view, group in new], GROUP_FIGURES)
        return self._group_rows(figures, self._services(figures[0], figures[6:11]))

    def eviction_costs(self, view: QueueView) -> EvictionCosts:
        """Costs of evicting all runs of an instance. Raises NoProfile."""
        workload = self.profiles.workload_for(view.active_model, "", "")
        hardware, batch_max = self._profiles_of[self.engine(view, view.active_model)]
        share = workload.uncached_share
        running = service(workload.prompt_tokens_mean, workload.output_tokens, hardware, batch_max, uncached_share=share)
        return eviction_costs(running, workload.prompt_tokens_mean, hardware)

    def model_code(self, model: str) -> float:
        """The number that stands for a model here; "" is that of no model."""
        return self._models.setdefault(model, float(len(self._models)))

    def _view_rows(self, view: QueueView, number: int) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        engine_of = {model: self._engine_row(view, model) for model in {group.model: None for group in view.groups}}
        groups = [self._group_row(engine_of[group.model], group) for group in view.groups]
        runners: list[tuple[float, ...]] = []
        if view.running > 0 and view.active_model:
            counted = sum(runner.count for runner in view.runners)
            rest = (RunningView(slo_class="", token_class="", count=view.running - counted),) if counted < view.running else ()
            known = engine_of.get(view.active_model)
            engine = self.engine(view, view.active_model) if known is None else int(known[0])
            runners = [self._runner_row(view, number, engine, runner) for runner in (*view.runners, *rest) if runner.count]
        return groups, runners

    def _engine_row(self, view: QueueView, model: str) -> tuple[float, float, float]:
        """The engine, the model's number, and whether it is warm; the active one is, once another has taken its place."""
        return self.engine(view, model), self.model_code(model), 1.0 if model in (view.active_model, *view.warm_models) else 0.0

    def _group_row(self, engine: tuple[float, float, float], group: GroupView) -> tuple[float, ...]:
        waiting = group.waiting
        key = (group.model, group.slo_class, group.token_class, group.output_tokens_max)
        prompt = group.waiting_prompt_tokens / waiting if waiting else 0.0
        lengths = self._classes.get(key)
        if lengths is None:
            lengths = self._classes[key] = self._class(*key)
        if group.output_tokens is not None:
            known = min(max(group.output_tokens.mean, 1.0), group.output_tokens_max)
            lengths = (lengths[0], known, group.output_tokens.variance, lengths[3], NOT_OF_CLASS)
        return (
            *engine,
            waiting,
            group.first_deadline_s,
            group.band,
            prompt,
            *lengths,
            group.output_tokens_max,
        )

    def _runner_row(self, view: QueueView, number: int, engine: int, runner: RunningView) -> tuple[float, ...]:
        """One class of what runs: its left tokens in all (-1: as many as the class's requests have left on average) and their variance;
        how unlike each other they are beyond that, as a sum of squares, and the most that one of them is expected to have left."""
        model = view.active_model
        workload = self.profiles.workload_for(model, runner.slo_class, runner.token_class)
        output = self._output(model, runner.slo_class, runner.token_class, runner.output_tokens_max)
        left, spread = -1.0, output.variance * runner.count
        unlike = longest = 0.0
        prompt = workload.prompt_tokens_mean if runner.prompt_tokens is None else runner.prompt_tokens / runner.count
        if view.running_output_left is not None:
            left, spread = view.running_output_left.mean * runner.count, view.running_output_left.variance * runner.count
        elif runner.produced_tokens:
            produced = np.array(runner.produced_tokens, dtype=np.float64)
            means, variances = self.profiles.output_curve_for(model, runner.slo_class, runner.token_class).left_of(produced)
            # A token is left at least, and no more than the limit leaves.
            means = np.clip(means, 1.0, np.maximum(1.0, runner.output_tokens_max - produced))
            left, spread = float(means.sum()), float(variances.sum())
            unlike, longest = float(((means - means.mean()) ** 2).sum()), float(means.max())
        else:
            longest = longest_among(self.profiles.longest_output_for(model, runner.slo_class, runner.token_class), runner.count)
        hardware = self._profiles_of[engine][0]
        usual = prompt + workload.prompt_tokens_variance / max(1.0, prompt)  # of the request that a token of a prompt belongs to
        outstanding_s = hardware.prefill_work_s(runner.prefill_left_tokens, runner.prefill_left_tokens * usual, workload.uncached_share)
        if runner.offloaded_tokens:
            outstanding_s += hardware.kv_swap_s(runner.offloaded_tokens)
        return (
            number,
            engine,
            runner.count,
            prompt,
            workload.prompt_tokens_variance,
            output.mean,
            output.variance,
            workload.uncached_share,
            left,
            spread,
            outstanding_s,
            unlike,
            longest,
            runner.unstarted(prompt),
        )

    def engine(self, view: QueueView, model: str) -> int:
        """The number of a model's engine on an instance. Raises NoProfile."""
        instance = view.instance
        batch = instance.batch_of(model)
        now = (instance.gpu, instance.n_gpu, instance.time_scale, batch)
        known = self._engines.get((instance.name, model))
        found = None if known is None or known[0] != now else known[1]
        if found is None:
            spec = self._catalogue.get(model)
            hardware = None if spec is None else self.profiles.hardware_for(instance, spec)
            if hardware is None:
                raise NoProfile(f"no profile of {model} on {view.instance.name}")
            found = len(self._profiles_of)
            self._engines[instance.name, model] = (now, found)
            self._profiles_of.append((hardware, float(batch)))
            self._columns = None
        return found

    def _class(self, model: str, slo_class: str, token_class: str, output_tokens_max: float) -> tuple[float, float, float, float, float]:
        """Variance of the prompts of a class, mean and variance of its outputs, its uncached share, and the row of its longest outputs."""
        workload = self.profiles.workload_for(model, slo_class, token_class)
        output = self._output(model, slo_class, token_class, output_tokens_max)
        # The spread of all of a model's prompts says nothing of one token class.
        spread = workload.prompt_tokens_variance if workload.token_class == token_class else 0.0
        self._longest.append(self.profiles.longest_output_for(model, slo_class, token_class))
        return (spread, output.mean, output.variance, workload.uncached_share, len(self._longest) - 1.0)

    def _output(self, model: str, slo_class: str, token_class: str, most: float) -> Normal:
        """The outputs of a class under a limit: bounded as lengths are, of which none is below a token."""
        curve = self.profiles.output_curve_for(model, slo_class, token_class)
        if most == math.inf or curve.survival(most) <= SHARE_MIN:
            return self.profiles.workload_for(model, slo_class, token_class).output_tokens
        return curve.left(0.0, most)

    def _made(
        self, views: Sequence[QueueView], groups: Sequence[tuple[float, ...]], runners: Sequence[tuple[float, ...]], sizes: Sequence[int]
    ) -> QueueGroups:
        lead = np.zeros((LEAD_ROWS, len(views)))
        lead[LEAD_MODEL] = [self.model_code(view.active_model) for view in views]
        lead[LEAD_LOADING] = [self._load_left_s(view) for view in views]
        waiting, running = _columns(groups, GROUP_FIGURES), _columns(runners, RUNNER_FIGURES)
        alone = self._services(np.concatenate((waiting[0], running[1])), np.concatenate((waiting[6:11], running[3:8]), axis=1))
        of = np.concatenate((waiting[0], running[1])).astype(np.int64)
        if of.size:
            # A run counts by the share of it that is left.
            left = np.where(running[8] < 0.0, running[2], running[8] / running[5])
            prompts = np.concatenate((waiting[6], running[3]))
            mix = batch_mix(self._engine_columns(), of, np.concatenate((waiting[3], left)), prompts, alone)
            self._mix = mix.over(self._mix, of)
        if runners:
            self._fill_lead(lead, running, _part(alone, slice(len(groups), None)))
        rows = self._group_rows(waiting, _part(alone, slice(len(groups))))
        first = np.concatenate(([0], np.cumsum(np.array(sizes, dtype=np.int64))))
        return QueueGroups(
            rows=rows,
            lead=lead,
            first=first,
            arrivals_per_s=np.array([view.arrivals_per_s for view in views], dtype=np.float64),
        )

    def _load_left_s(self, view: QueueView) -> float:
        """Until the active model is loaded; 0 where nobody knows how long that takes."""
        if view.loading_s is None or not view.active_model:
            return 0.0
        try:
            hardware, _ = self._profiles_of[self.engine(view, view.active_model)]
        except NoProfile:
            return 0.0
        return max(0.0, hardware.swap_s(warm=view.active_model in view.warm_models) - view.loading_s)

    def _services(self, of: Floats, figures: Floats) -> ServiceColumns:
        """Services of classes alone, each on its engine: mean prompts, their variance, mean outputs and theirs, uncached shares."""
        return services(self._engine_columns(), of.astype(np.int64), *figures)

    def _engine_columns(self) -> EngineColumns:
        if self._columns is None:
            self._columns = EngineColumns.of(self._profiles_of)
        return self._columns

    def _group_rows(self, figures: Floats, alone: ServiceColumns) -> Floats:
        """The columns of groups, by their figures [GROUP_FIGURES, groups] and their services alone."""
        rows = np.zeros((ROWS, figures.shape[1]))
        if not figures.shape[1]:
            return rows
        engine, of = self._engine_columns(), figures[0].astype(np.int64)
        served = self._mixed(alone, of)
        rows[ENGINE], rows[MODEL], rows[COUNT] = figures[0], figures[1], figures[3]
        rows[WARM] = engine.warm_s[of]
        rows[SWAP] = np.where(figures[2] > 0.0, rows[WARM], engine.cold_s[of])
        rows[DEADLINE], rows[BAND] = figures[4:6]
        rows[PREFILL_BASE], rows[PREFILL_TOKEN] = engine.prefill_base_s[of], engine.prefill_token_s[of]
        longest, rows[LONGEST_SCALE] = self._longest_outputs(served, figures[3], figures[11])
        rows[LONGEST_OUTPUT] = np.minimum(longest, figures[12])
        rows[SERVICE:] = served.rows
        return rows

    def _longest_outputs(self, served: ServiceColumns, count: Floats, of_class: Floats) -> tuple[Floats, Floats]:
        """Longest output of so many requests of each class in one batch: mean and Gumbel scale."""
        among = np.clip(count, 1.0, np.minimum(served.batch, LONGEST_OF[-1]))
        table = np.array(self._longest) if self._longest else np.zeros((1, len(LONGEST_OF)))
        longest, scale = longest_of_counts(table, of_class.astype(np.int64), among)
        longest = np.maximum(longest, served.output)
        other = of_class == NOT_OF_CLASS
        if other.any():
            longest[other], variance = longest_of_each(served.output[other], served.output_variance[other], among[other])
            scale[other] = np.sqrt(6.0 * variance) / math.pi
        return longest, scale

    def _mixed(self, served: ServiceColumns, of: Integers) -> ServiceColumns:
        return served if self._mix is None else mixed(served, of, self._mix)

    def _fill_lead(self, lead: Floats, figures: Floats, alone: ServiceColumns) -> None:
        """Sums over the classes that run; the engine is drained when the last of all of them has ended."""
        queue, of, count = figures[0].astype(np.int64), figures[1].astype(np.int64), figures[2]
        served = self._mixed(alone, of)
        renewal = figures[8] < 0.0
        unstarted = figures[13]
        # The prefill makes the first token.
        whole = unstarted * np.maximum(alone.output - 1.0, 0.0)
        left = np.where(renewal, (count - unstarted) * alone.left_tokens + whole, figures[8] - unstarted)
        queues = lead.shape[1]

        def summed(value: Floats) -> Floats:
            return np.bincount(queue, weights=value, minlength=queues).astype(np.float64)

        share = count / served.batch
        lead[REQUESTS], lead[PREFILL], lead[DECODE] = summed(count), summed(figures[10]), summed(left * served.token_s)
        lead[VARIANCE], lead[SEATS] = summed(figures[9] * served.token_s**2), summed(share)
        lead[LEFT] = summed(count * alone.left_tokens * served.token_s)
        # Those that wait in the engine for their prefill are of its batch as far as this has seats.
        behind = np.minimum(whole, left) * served.token_s
        seats = summed(unstarted / served.batch)
        beyond = np.clip(lead[SEATS] - 1.0, 0.0, seats) / np.maximum(seats, 1e-12)
        lead[LEAD_HELD] = lead[DECODE] - beyond * summed(behind)
        # The last to end: of those that run for good, a whole output at the most; where more is known, what is known.
        each = np.where(renewal, served.output, left / count)
        total = np.maximum(lead[REQUESTS], 1.0)
        mean = summed(count * each) / total
        variance = (summed(figures[9] + figures[11]) + summed(count * (each - mean[queue]) ** 2)) / total
        longest, spread = longest_of_each(mean, variance, total)
        np.maximum.at(longest, queue, figures[12])
        base_s = np.zeros(queues)
        base_s[queue] = served.step_base_s
        lead[LEAD_DRAIN] = longest * base_s + summed(left * served.sequence_s) + lead[PREFILL]
        lead[LEAD_DRAIN_VARIANCE] = spread * base_s**2


def _part(served: ServiceColumns, places: slice) -> ServiceColumns:
    return ServiceFigures(*(row[places] for row in served.rows))


def _columns(rows: Sequence[tuple[float, ...]], width: int) -> Floats:
    """The rows as the columns of an array. (`np.array` takes three times as long.)"""
    return np.fromiter(chain.from_iterable(rows), dtype=np.float64, count=len(rows) * width).reshape(len(rows), width).T
