"""An estimator machine that is fed events at times in seconds, and its publications."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from qlm_core.profiles.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.stream import EntryId
from qlm_estimator.events import (
    Effect,
    Event,
    GroupClass,
    Imported,
    Lifecycle,
    LifecycleKind,
    OperationKind,
    Publish,
    QueueSeen,
    ReportedOperation,
    Tick,
)
from qlm_estimator.machine import EstimatorMachine, Learning

SHIPPED = shipped_snapshot()
CATALOGUE = {
    "chat": ModelSpec(name="chat", profile="Mistral-7B"),
    "code": ModelSpec(name="code", profile="Mistral-7B"),
    "big": ModelSpec(name="big", profile="Vicuna-13B"),
}
INSTANCE = InstanceFacts(name="a", incarnation="a/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=tuple(CATALOGUE))
GROUPS = {"g": GroupClass(model="chat", slo_class="64s")}
BEGAN_MS = 1_700_000_000_000


class Driver:
    """Feeds a machine events at times in seconds after the beginning."""

    def __init__(self, learning: Learning | None = None, catalogue: Mapping[str, ModelSpec] = CATALOGUE) -> None:
        self._learning = learning or Learning()
        self._catalogue = catalogue
        self.restore(None)
        self.published: list[ProfileSnapshot] = []
        self.noted: list[Effect] = []
        self.serial = 0
        self.now_s = 0.0

    def seen(self, *, running: int = 0, instances: tuple[InstanceFacts, ...] = (INSTANCE,), last_event: EntryId | None = None) -> None:
        at = last_event or (BEGAN_MS + int(self.now_s * 1e3), self.serial)
        counts = {facts.incarnation: running for facts in instances}
        self._take(self.machine.step(self._clock_s(), QueueSeen(last_event=at, instances=instances, running=counts, groups=GROUPS)))

    def tick(self, at_s: float) -> None:
        self.now_s = at_s
        self._take(self.machine.step(self._clock_s(), Tick()))

    def restore(self, snapshot: ProfileSnapshot | None) -> None:
        """Starts a machine from a snapshot that another published, or from nothing."""
        self.machine = EstimatorMachine(learning=self._learning, catalogue=self._catalogue, shipped=SHIPPED.hardware, restored=snapshot)

    def bring(self, snapshot: ProfileSnapshot) -> None:
        self._take(self.machine.step(self._clock_s(), Imported(snapshot=snapshot)))

    def step(self, at_s: float, event: Event) -> None:
        """Any event, in an entry of its own."""
        self.now_s = at_s
        self._take(self.machine.step(self._clock_s(), event))
        self.serial += 1
        self._entry_read((BEGAN_MS + int(self.now_s * 1e3), self.serial))

    def report(self, kind: LifecycleKind, at_s: float, queue_id: str = "1", **fields: object) -> Lifecycle:
        self.now_s = at_s
        self.serial += 1
        known: dict[str, object] = {"attempt": 1, "prompt_tokens": 500, "incarnation": "a/1", "group_id": "g", **fields}
        event = Lifecycle(
            kind=kind,
            entry_id=(BEGAN_MS + int(at_s * 1e3), self.serial),
            index=0,
            queue_id=queue_id,
            **known,  # type: ignore[arg-type]
        )
        self.again(event)
        return event

    def again(self, event: Lifecycle) -> None:
        self.last = event
        self._take(self.machine.step(self._clock_s(), event))
        self._entry_read(event.entry_id)

    def operation(self, kind: OperationKind, at_s: float, took_s: float, **fields: object) -> ReportedOperation:
        """An operation of model `chat` on the instance, in an entry of its own."""
        self.now_s = at_s
        self.serial += 1
        known: dict[str, object] = {"incarnation": "a/1", "model": "chat", **fields}
        operation = ReportedOperation(kind=kind, entry_id=(BEGAN_MS + int(at_s * 1e3), self.serial), index=0, took_s=took_s, **known)  # type: ignore[arg-type]
        self.report_operation(operation)
        return operation

    def report_operation(self, operation: ReportedOperation) -> None:
        self._take(self.machine.step(self._clock_s(), operation))
        self._entry_read(operation.entry_id)

    def _entry_read(self, entry_id: EntryId) -> None:
        self._take(self.machine.step(self._clock_s(), Tick(read_to=entry_id)))

    def run(self, began_s: float, ended_s: float, queue_id: str = "1", **fields: object) -> None:
        """Its prefill has the share of the time that it has by the A100 row, where it runs by itself."""
        made = fields.get("output_tokens", 200)
        tokens = made if isinstance(made, int) and 1 <= made <= 8_192 else 200
        first_token_s = BEGAN_MS / 1e3 + began_s + (ended_s - began_s) * duration_s(1) / duration_s(tokens)
        fields = {"first_token_s": first_token_s, **fields}
        self.report(LifecycleKind.PULLED, began_s, queue_id, **{key: fields[key] for key in fields if key in ("attempt", "incarnation")})
        self.report(LifecycleKind.COMPLETED, ended_s, queue_id, **{"model": "chat", "output_tokens": 200, "slo_class": "64s", **fields})

    def workload(self) -> dict[tuple[str, str, str], WorkloadProfile]:
        self.tick(self.now_s + 1_000.0)
        return {row.key: row for row in self.machine.snapshot.workload}

    def learned(self) -> list[HardwareProfile]:
        self.tick(self.now_s + 1_000.0)
        return [row for row in self.machine.snapshot.hardware if row.instance]

    def _clock_s(self) -> float:
        return BEGAN_MS / 1e3 + self.now_s

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.published.append(effect.snapshot)
            else:
                self.noted.append(effect)


@cache
def duration_s(output_tokens: int, prompt_tokens: int = 500, slowdown: float = 1.0) -> float:
    """Duration of a run by itself, by the A100 row."""
    row = SHIPPED.hardware_for(INSTANCE, CATALOGUE["chat"])
    assert row is not None
    decode_s = sum(row.decode_step_s(1, prompt_tokens + produced) for produced in range(1, output_tokens))
    return slowdown * (row.prefill_work_s(prompt_tokens) + decode_s)
