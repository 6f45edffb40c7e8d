"""Service times of many groups at once, on arrays.

A class is (instances that serve alike, group key, prompt length to within `PROMPT_STEP`). Figures of a class are computed once a snapshot
of the profiles, as a column of a table; a group adds its count, prompt tokens and deadline. So 10,000 groups cost a few array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from qlm_core.profiles.hardware_profile import prefill_shares
from qlm_core.statistics.length_curve import LONGEST_OF, longest_of_counts
from qlm_core.vocabulary.group import GroupKey
from qlm_core.vocabulary.request import SloKind
from qlm_planner.board.board import Board
from qlm_planner.board.group import Group
from qlm_planner.board.slot import Slot
from qlm_planner.board.tenants import weight_of
from qlm_planner.cost import order_cost as of
from qlm_planner.cost.absence import Absences
from qlm_planner.cost.estimates import PROMPT_STEP, Estimates, Likeness
from qlm_planner.cost.expected_absences import absences_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
SIZES = 96
"""Prompt sizes: e^(96 * PROMPT_STEP) tokens are beyond every context."""
TRAITS_MAX = 50_000
"""Most groups with a cached key; beyond it the cache is emptied."""
KEYS_MAX = 5_000
"""Most numbered keys, which hold names of tenants; beyond it numbering restarts."""
SLOTS_MAX = 10_000
"""Most numbered (instance, model, batch); beyond it numbering restarts."""
COLUMNS_FIRST = 256
"""Columns of a new table; it doubles."""

(
    OUTPUT,
    OUTPUT_VARIANCE,
    BATCH,
    STEP_S,
    TOKEN_S,
    BASE_S,
    SEQUENCE_S,
    LEFT_TOKENS,
    PREFILL_BASE_S,
    PREFILL_CLASS_S,
    PREFILL_TOKEN_S,
    PREFILL_SQUARE_S,
    PROMPT_VARIANCE,
    COLD_S,
    WARM_S,
    ANSWERS,
) = range(16)
"""Rows of a class. `ANSWERS`: 1 where the SLO bounds the first token; the table of the longest outputs follows. Times are NaN where the
instance does not serve the model."""
LONGEST_AT = 16
ROWS = LONGEST_AT + len(LONGEST_OF)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupColumns:
    """Groups [groups] as arrays: key number, size of the mean prompt, own figures. `band`: the rank."""

    ids: list[str]
    key: Integers
    size: Integers
    model: Integers
    band: Floats
    count: Floats
    prompt_tokens: Floats
    deadline_s: Floats
    spread_s: Floats
    slo_s: Floats
    weight: Floats
    due_share: Floats

    def take(self, chosen: Integers) -> GroupColumns:
        """Some groups, in order; without ids."""
        arrays = {each.name: getattr(self, each.name)[chosen] for each in fields(self) if each.name != "ids"}
        return GroupColumns(ids=[], **arrays)

    def beside(self, others: GroupColumns) -> GroupColumns:
        """These groups, then others."""
        arrays = {each.name: np.concatenate((getattr(self, each.name), getattr(others, each.name))) for each in fields(self)[1:]}
        return GroupColumns(ids=[*self.ids, *others.ids], **arrays)


@dataclass(slots=True, kw_only=True)
class ClassTable:
    """The table of classes for one `Estimates`; emptied when that loads other profiles."""

    estimates: Estimates
    _version: int = -1
    _keys: list[GroupKey] = field(default_factory=list)
    _models: list[int] = field(default_factory=list)
    _weights: list[float] = field(default_factory=list)
    _key_numbers: dict[GroupKey, int] = field(default_factory=dict)
    _traits: dict[str, int] = field(default_factory=dict)
    _slots: dict[tuple[str, str, int], int] = field(default_factory=dict)
    _kinds: dict[Likeness, int] = field(default_factory=dict)
    _column_of: NDArray[np.int32] = field(default_factory=lambda: np.full((0, 0, SIZES), -1, dtype=np.int32))
    _table: Floats = field(default_factory=lambda: np.zeros((ROWS, COLUMNS_FIRST)))
    _used: int = 0
    _absences_key: tuple[object, ...] = ()
    _absences: Absences = field(default_factory=lambda: Absences.none(0, 0))

    def columns(self, groups: Sequence[Group]) -> GroupColumns:
        """The columns of groups. O(groups); for cached groups it only reads counts."""
        self._refresh()
        if len(self._keys) > KEYS_MAX:
            self._forget_keys()
        known = self._traits
        if len(known) > TRAITS_MAX:
            known.clear()
        ids = [group.group_id for group in groups]
        numbers = [known.get(group_id) for group_id in ids]
        if None in numbers:
            numbers = [self._number(group) for group in groups]
        key = np.array(numbers, dtype=np.int64)
        # One list per field: an array of tuples takes twice as long.
        count, prompt_tokens, deadline_s, spread_s, slo_s, due_share, rank = np.array(
            [
                [group.waiting for group in groups],
                [group.waiting_prompt_tokens for group in groups],
                [group.next_deadline_s for group in groups],
                [group.spread_s for group in groups],
                [group.slo_least_s for group in groups],
                [group.due_share for group in groups],
                [group.rank for group in groups],
            ],
            dtype=np.float64,
        )
        mean = prompt_tokens / np.maximum(1.0, count)
        size = np.minimum(np.rint(np.log(np.maximum(1.0, mean)) / PROMPT_STEP), SIZES - 1).astype(np.int64)
        return GroupColumns(
            ids=ids,
            key=key,
            size=size,
            model=np.array(self._models, dtype=np.int64)[key] if len(groups) else key,
            band=rank,
            count=count,
            prompt_tokens=prompt_tokens,
            deadline_s=deadline_s,
            spread_s=spread_s,
            slo_s=slo_s,
            weight=np.array(self._weights)[key] if len(groups) else count,
            due_share=due_share,
        )

    def models(self, groups: GroupColumns) -> tuple[list[str], Integers]:
        """The models of groups by name, and each group's index among them."""
        _, one_of, place = np.unique(groups.model, return_index=True, return_inverse=True)
        return [self._keys[number].model for number in groups.key[one_of].tolist()], place

    def _number(self, group: Group) -> int:
        key = group.traits.key
        number = self._key_numbers.get(key)
        if number is None:
            number = self._key_numbers[key] = len(self._keys)
            self._keys.append(key)
            self._models.append(self.estimates.code(key.model))
            self._weights.append(weight_of(key.tenant_class))
        self._traits[group.group_id] = number
        return number

    def classes(self, slots: Sequence[Slot], on: Integers, groups: GroupColumns) -> Floats:
        """The classes of groups on `slots[on]` [ROWS, ...]: `on` [groups], or [kinds, 1] for all groups on each."""
        self._refresh()
        codes = np.unique(groups.model).tolist()
        numbers = np.zeros((len(slots), max(codes, default=0) + 1), dtype=np.int64)
        one_of: dict[int, Slot] = {}
        for code in codes:
            model = self.estimates.model(code)
            for at, slot in enumerate(slots):
                numbers[at, code] = number = self._kind(slot, model)
                one_of[number] = slot
        self._grow()
        place = (numbers[on, groups.model], groups.key, groups.size)
        columns = self._column_of[place]
        if (columns < 0).any():
            missing = np.stack(np.broadcast_arrays(*place))[:, columns < 0]
            for number, key, size in sorted(set(zip(*missing.tolist(), strict=True))):
                self._fill(one_of[number], number, key, size)
            columns = self._column_of[place]
        return self._table[:, columns]

    def rows(self, slots: Sequence[Slot], on: Integers, groups: GroupColumns, crowd: float | Floats, now_s: float) -> Floats:
        """Rows of `order_cost` for groups on the queues of `slots[on]`; a group that its instance cannot serve weighs nothing. `crowd`: as
        in `service_times`."""
        shared = self.classes(slots, on, groups)
        requests = groups.count * groups.weight * groups.due_share
        deadline_s = np.minimum(groups.deadline_s - now_s, of.FAR_S)
        slo_s = np.minimum(groups.slo_s, of.FAR_S)
        warm = self._warm(slots)[on, groups.model]
        rows = np.empty((of.GROUP_ROWS, len(on)))
        rows[: of.DRAIN + 1] = service_times(shared, groups, crowd)
        rows[of.REQUESTS], rows[of.DEADLINE], rows[of.SPREAD] = requests, deadline_s, groups.spread_s
        rows[of.SWAP], rows[of.WARM] = np.where(warm, shared[WARM_S], np.maximum(shared[COLD_S], shared[WARM_S])), shared[WARM_S]
        rows[of.MODEL], rows[of.BAND], rows[of.COUNT], rows[of.SLO] = groups.model, groups.band, groups.count, slo_s
        unserved = np.isnan(shared[TOKEN_S])
        if unserved.any():
            rows[: of.MODEL, unserved] = 0.0
            rows[of.DEADLINE, unserved] = of.FAR_S
        return rows

    def absences(self, board: Board, slots: Sequence[Slot]) -> Absences:
        """`absences_of`, cached until the demand or the instances' models change."""
        serving = [(slot.facts.incarnation, slot.active_model, slot.batch(slot.active_model), *slot.warm_models) for slot in slots]
        key = (self.estimates.version, self.estimates.codes, board.expectations, *serving)
        if key != self._absences_key:
            self._absences_key, self._absences = key, absences_of(board, self.estimates, slots)
        return self._absences

    def _warm(self, slots: Sequence[Slot]) -> NDArray[np.bool_]:
        """Models in host memory [slots, models]."""
        estimates = self.estimates
        codes = [[estimates.code(model) for model in slot.warm_models] for slot in slots]
        models = max([*self._models, *(code for each in codes for code in each)], default=0) + 1
        warm = np.zeros((len(slots), models), dtype=np.bool_)
        for number, each in enumerate(codes):
            warm[number, each] = True
        return warm

    def alike(self, slots: Sequence[Slot]) -> list[Likeness]:
        """The likeness of each instance."""
        self._refresh()
        return [tuple(self._kind(slot, model) for model in slot.facts.models) for slot in slots]

    def _refresh(self) -> None:
        if self._version != self.estimates.version or len(self._slots) > SLOTS_MAX:
            self._version = self.estimates.version
            self._slots.clear()
            self._kinds.clear()
            self._forget_columns()

    def _forget_columns(self) -> None:
        self._used = 0
        self._column_of = np.full((0, 0, SIZES), -1, dtype=np.int32)

    def _forget_keys(self) -> None:
        self._keys.clear()
        self._models.clear()
        self._weights.clear()
        self._key_numbers.clear()
        self._traits.clear()
        self._forget_columns()

    def _kind(self, slot: Slot, model: str) -> int:
        """The number of an instance and a model; instances that serve the model alike share it."""
        place = (slot.facts.incarnation, model, slot.batch(model))
        number = self._slots.get(place)
        if number is None:
            number = self._kinds.setdefault(self.estimates.likeness(slot, model), len(self._kinds))
            self._slots[place] = number
        return number

    def _grow(self) -> None:
        slots, keys, _ = self._column_of.shape
        if slots < len(self._kinds) or keys < len(self._keys):
            wider = np.full((max(2 * slots, len(self._kinds)), max(2 * keys, len(self._keys)), SIZES), -1, dtype=np.int32)
            wider[:slots, :keys] = self._column_of
            self._column_of = wider

    def _fill(self, slot: Slot, number: int, key_number: int, size: int) -> None:
        if self._used == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
        self._table[:, self._used] = self._shared(slot, self._keys[key_number], size)
        self._column_of[number, key_number, size] = self._used
        self._used += 1

    def _shared(self, slot: Slot, key: GroupKey, size: int) -> Floats:
        """The column of a class; NaN where the instance does not serve it."""
        column = np.full(ROWS, np.nan)
        facts = self.estimates.class_of(slot, key, size)
        if facts is None:
            return column
        served, hardware = facts.service, facts.hardware
        scale = hardware.slowdown * 1e-3
        linear, squared = prefill_shares(facts.uncached_share)
        column[:LONGEST_AT] = (
            served.output.mean,
            served.output.variance,
            served.batch,
            served.step_s,
            served.token_s,
            served.step_base_s,
            served.sequence_s,
            served.left_tokens,
            served.prefill_s - served.prefill_work_s,
            served.prefill_work_s,
            hardware.prefill_ms_per_token * scale * linear,
            hardware.prefill_ms_per_token_squared * scale * squared,
            facts.prompt_variance,
            hardware.swap_s(warm=False),
            hardware.swap_s(warm=True),
            float(key.slo_kind is SloKind.FIRST_TOKEN),
        )
        column[LONGEST_AT:] = facts.longest
        return column


def service_times(shared: Floats, groups: GroupColumns, crowd: float | Floats) -> Floats:
    """Rows WORK to DRAIN of `order_cost` [5, ..., groups]. `shared` [ROWS, ..., groups]: of the classes. `crowd`: mean requests of an
    instance; beyond a group's own requests they enlarge its batch and add prefills. The part of a group's decode work that is in flight
    counts once before the next run, as work and not as drain."""
    count, batch, output = groups.count, shared[BATCH], shared[OUTPUT]
    mean = groups.prompt_tokens / np.maximum(1.0, count)
    known_s = shared[PREFILL_TOKEN_S] * mean + shared[PREFILL_SQUARE_S] * (mean * mean + shared[PROMPT_VARIANCE])
    prefill_s = np.where(count > 0.0, known_s, shared[PREFILL_CLASS_S])
    own_batch = np.minimum(batch, np.maximum(1.0, count))
    together = np.maximum(count, crowd)
    in_batch = np.minimum(batch, np.maximum(1.0, together))
    pace_s = shared[BASE_S] + in_batch * (shared[SEQUENCE_S] + shared[PREFILL_CLASS_S] / output)
    bounded = 1.0 - shared[ANSWERS]
    own_prefill_s = shared[PREFILL_BASE_S] + prefill_s
    table = shared[LONGEST_AT:].reshape(len(LONGEST_OF), -1).T
    longest, _ = longest_of_counts(table, np.arange(len(table)), np.fmin(count, batch).ravel())
    longest = longest.reshape(batch.shape)
    own_tokens = own_batch * np.where(count > batch, shared[LEFT_TOKENS], output)
    drain_s = own_prefill_s + longest * shared[BASE_S] + shared[SEQUENCE_S] * np.minimum(own_tokens, batch * longest)
    decode_s = count * output * shared[TOKEN_S]
    in_flight_s = np.minimum(decode_s, shared[LEFT_TOKENS] * shared[STEP_S] * np.minimum(1.0, count / batch))
    times: dict[int, Floats] = {
        of.WORK: count * prefill_s + decode_s,
        of.WORK_VARIANCE: count * shared[OUTPUT_VARIANCE] * shared[TOKEN_S] ** 2,
        of.OWN: own_prefill_s + bounded * output * pace_s,
        of.OWN_VARIANCE: bounded * shared[OUTPUT_VARIANCE] * pace_s**2,
        of.DRAIN: np.maximum(0.0, drain_s - in_flight_s),
    }
    return np.array([times[row] for row in range(of.DRAIN + 1)])
