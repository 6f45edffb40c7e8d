"""A queue in memory, a virtual clock and one planner machine: what the planner's tests drive.

Calls of the machine are carried out at once, one after the other; blocking reads are answered when there is something to read. `faults`
makes calls fail before or after they happened. `solver` answers its jobs at once, or (None) later, by an event that the test delivers.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from qlm.api.v1 import request_pb2
from qlm_core.profiles.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import RequestKey, RequestState, Slo, SloKind
from qlm_planner.machine.effects import (
    ApplyChunk,
    Call,
    JobEnded,
    Place,
    PlanApplied,
    PlanChanged,
    ReadArrivals,
    ReadEvents,
    Regroup,
    Solve,
    WaitsFailed,
)
from qlm_planner.machine.events import ArrivalsRead, CallFailed, Event, EventsRead, ProfilesRead, Solved, SolveFailed, Tick
from qlm_planner.machine.step import PlannerMachine
from qlm_planner.policy import Policy
from qlm_planner.shell.queue_calls import perform
from qlm_planner.shell.solver_requests import answer
from qlm_process.wire.instance import to_body
from qlm_process.wire.slo import SLO_KIND_NUMBERS
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import PLANNER_ROLE, Acceptance, Bounds, Completion, Emission, Lease, PullBudget, Pulled

START_S = 1_700_000_000.0
ROUNDS_MAX = 10_000
LEASE_S = 3.0
FOREVER_S = 1e6

MODELS = ("alpha", "beta", "gamma")
CATALOGUE = {name: ModelSpec(name=name, profile=name) for name in MODELS}


def hardware(gpu: str, model: str, *, speed: float = 1.0, swap_s: float = 10.0, kv_tokens: int = 40_000) -> HardwareProfile:
    """An engine of `speed`, whose swaps take `swap_s` from disk and a fifth of that from host memory."""
    return HardwareProfile(
        gpu=gpu,
        n_gpu=1,
        model=model,
        weights_gb=14.0,
        kv_bytes_per_token=131_072,
        kv_capacity_tokens=kv_tokens,
        decode_a_ms=20.0 / speed,
        decode_b_ms_per_seq=0.1 / speed,
        decode_c_ms_per_context_token=0.0,
        prefill_base_ms=5.0 / speed,
        prefill_ms_per_token=0.1 / speed,
        load_disk_to_cpu_s=0.8 * swap_s,
        load_cpu_to_gpu_s=0.2 * swap_s,
        kv_swap_us_per_token=5.0,
        recompute_us_per_token=100.0,
    )


def profiles(
    *, gpus: Sequence[str] = ("big", "small"), output_tokens: float = 100.0, swap_s: float = 10.0, version: int = 0
) -> ProfileSnapshot:
    """`big` is twice as fast as `small`; every model makes `output_tokens` in the mean."""
    speeds = {"big": 2.0, "small": 1.0}
    return ProfileSnapshot(
        version=version,
        made_s=0.0,
        hardware=tuple(hardware(gpu, model, speed=speeds.get(gpu, 1.0), swap_s=swap_s) for gpu in gpus for model in MODELS),
        workload=tuple(
            WorkloadProfile(
                model=model,
                prompt_tokens_mean=200.0,
                prompt_tokens_variance=100.0,
                output_tokens_mean=output_tokens,
                output_tokens_variance=(output_tokens / 5) ** 2,
                samples=1_000_000,
            )
            for model in MODELS
        ),
    )


class World:
    """`machine` is None until `lead`."""

    def __init__(self, policy: Policy | None = None, snapshot: ProfileSnapshot | None = None) -> None:
        self.now_s = START_S
        # Events are known at once, in tests that do not let time pass.
        self.policy = replace(policy or Policy(lease_ttl_s=LEASE_S), events_gap_s=0.0)
        self.snapshot = snapshot or profiles()
        self.queue = MemoryQueue("test", Bounds(), lambda: self.now_s)
        self.machine: PlannerMachine | None = None
        self.lease: Lease | None = None
        self.calls: list[Call] = []
        self.changes: list[PlanChanged] = []
        self.applied: list[PlanApplied] = []
        self.jobs: list[JobEnded] = []
        self.solves: list[Solve] = []
        self.solver: Callable[[Solve], Solved | SolveFailed | None] = answer
        self.agents: dict[str, tuple[str, Lease]] = {}
        self.faults: Callable[[Call], str] = lambda call: ""
        self.before_place: Callable[[], Awaitable[None]] | None = None
        self.before_chunk: Callable[[], Awaitable[None]] | None = None
        self.before_regroup: Callable[[], Awaitable[None]] | None = None
        self._numbers = itertools.count(1)
        self._waiting: list[Call] = []
        self._events: list[Event] = []

    # The cluster ------------------------------------------------------------------------------------------------------

    async def join(
        self, name: str, gpu: str = "big", models: Sequence[str] = MODELS, *, ttl_s: float = FOREVER_S, draining: bool = False
    ) -> str:
        """Registers an instance; returns its incarnation."""
        facts = InstanceFacts(name=name, incarnation="", gpu=gpu, n_gpu=1, engine="simulated", models=tuple(models), draining=draining)
        nonce = f"{name}-{next(self._numbers)}"
        incarnation, lease = await self.queue.register(name, nonce, to_body(facts), ttl_s)
        self.agents[name] = (incarnation, lease)
        return incarnation

    async def drain(self, name: str, gpu: str = "big", models: Sequence[str] = MODELS) -> None:
        facts = InstanceFacts(name=name, incarnation="", gpu=gpu, n_gpu=1, engine="simulated", models=tuple(models), draining=True)
        await self.queue.describe(self.agents[name][1], to_body(facts))

    async def kill(self, name: str) -> None:
        """Its lease ends."""
        await self.queue.release_lease(self.agents[name][1])

    async def submit(
        self,
        model: str = "alpha",
        slo_s: float = 60.0,
        *,
        count: int = 1,
        prompt_tokens: int = 200,
        priority: int | None = None,
        kind: SloKind = SloKind.COMPLETION,
        expire_after_s: float | None = None,
        tenant: str = "tenant",
    ) -> list[RequestKey]:
        keys = []
        slo = Slo(kind=kind, seconds=slo_s) if priority is None else Slo(kind=SloKind.PRIORITY, priority=priority)
        for _ in range(count):
            key = RequestKey(tenant, f"r{next(self._numbers)}")
            stored = request_pb2.Slo(priority=slo.priority, seconds=0.0 if priority is not None else slo.seconds)
            stored.kind = SLO_KIND_NUMBERS[slo.kind]
            body = request_pb2.Request(
                model=model,
                text="x",
                tenant=key.tenant,
                request_id=key.request_id,
                admission=request_pb2.Admission(prompt_tokens=prompt_tokens, output_tokens_max=256, slo=stored),
            )
            await self.queue.accept(
                Acceptance(
                    key=key,
                    body=body.SerializeToString(),
                    digest=bytes(16),
                    gateway="gateway",
                    slo_class="any",
                    prompt_tokens=prompt_tokens,
                    expire_after_s=expire_after_s,
                )
            )
            keys.append(key)
        return keys

    async def pull(self, name: str, model: str, count: int = 1) -> list[Pulled]:
        budget = PullBudget(requests_max=count, kv_tokens=10_000_000, output_reserve_tokens=0)
        return list((await self.queue.pull(self.agents[name][1], model, budget)).pulled)

    async def cancel(self, keys: Sequence[RequestKey]) -> None:
        for key in keys:
            await self.queue.cancel(key, b"")

    async def complete(self, name: str, pulled: Sequence[Pulled]) -> None:
        await self.queue.complete(
            self.agents[name][0],
            [
                Completion(
                    last=Emission(queue_id=each.queue_id, key=each.key, attempt=each.attempt, offset=0, progress=b"", frame=b""),
                    state=RequestState.COMPLETED,
                    result=b"",
                    event=b"",
                )
                for each in pulled
            ],
        )

    # The planner ------------------------------------------------------------------------------------------------------

    async def lead(self) -> PlannerMachine:
        """A new leader; the one before is gone, with everything it had under way."""
        if self.lease is not None:
            await self.queue.release_lease(self.lease)
        self.lease = await self.queue.acquire_lease(PLANNER_ROLE, f"nonce-{next(self._numbers)}", FOREVER_S, "address")
        assert self.lease is not None
        self.machine = PlannerMachine(self.policy, self.lease.fence, self.now_s)
        self._waiting.clear()
        self._events.clear()
        await self.deliver(ProfilesRead(catalogue=CATALOGUE, profiles=self.snapshot))
        return self.machine

    async def deliver(self, event: Event) -> None:
        """Steps the machine, and carries out what it wants until only blocking reads are left."""
        self._events.append(event)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(ROUNDS_MAX):
            while self._events:
                self._step(self._events.pop(0))
                if (
                    any(isinstance(call, ApplyChunk) for call in self._waiting)
                    and self.machine is not None
                    and self.machine.wake_s <= self.now_s
                ):
                    self._step(Tick())  # the next chunk leaves while one is under way
            ready = [call for call in self._waiting if not isinstance(call, ReadArrivals | ReadEvents)]
            reads = [call for call in self._waiting if isinstance(call, ReadArrivals | ReadEvents)]
            for call in [*ready, *reads]:
                await self._carry_out(call)
            if not self._events:
                return
        raise AssertionError("the machine does not come to rest")

    async def advance(self, seconds: float) -> None:
        """Lets time pass; the machine is woken when it wants."""
        assert self.machine is not None
        end_s = self.now_s + seconds
        for _ in range(ROUNDS_MAX):
            await self.settle()
            wake_s = self.machine.wake_s
            if wake_s >= end_s:
                self.now_s = end_s
                await self.deliver(Tick())
                return
            assert wake_s >= self.now_s or not self.machine.ready, "it wants to be woken in the past"
            self.now_s = max(self.now_s, wake_s)
            await self.deliver(Tick())
        raise AssertionError("the machine wakes too often")

    def _step(self, event: Event) -> None:
        assert self.machine is not None
        for effect in self.machine.step(self.now_s, event):
            if isinstance(effect, PlanChanged):
                self.changes.append(effect)
            elif isinstance(effect, PlanApplied):
                self.applied.append(effect)
            elif isinstance(effect, WaitsFailed):
                raise AssertionError(effect.reason)
            elif isinstance(effect, JobEnded):
                self.jobs.append(effect)
            elif isinstance(effect, Solve):
                self.solves.append(effect)
                found = self.solver(effect)
                if found is not None:
                    self._events.append(found)
            else:
                self.calls.append(effect)
                self._waiting.append(effect)

    async def _carry_out(self, call: Call) -> None:
        assert self.lease is not None
        if isinstance(call, Place) and self.before_place is not None:
            await self.before_place()
        if isinstance(call, ApplyChunk) and self.before_chunk is not None:
            await self.before_chunk()
        if isinstance(call, Regroup) and self.before_regroup is not None:
            await self.before_regroup()
        fault = self.faults(call)
        if fault != "before":
            at_once = replace(call, block_s=0.0) if isinstance(call, ReadArrivals | ReadEvents) else call
            event = await perform(self.queue, self.lease, at_once)
            if not fault and event in (ArrivalsRead(arrivals=()), EventsRead(entries=())):
                return
        self._waiting.remove(call)
        self._events.append(CallFailed(call=call) if fault else event)

    # Outcome ----------------------------------------------------------------------------------------------------------

    async def queues(self) -> dict[str, list[str]]:
        """Models of the groups on each virtual queue, as the queue has them."""
        overview = await self.queue.overview()
        return {
            queue.instance: [overview.groups[group_id].meta["model"] for group_id in queue.group_ids] for queue in overview.virtual_queues
        }

    async def group_ids(self, instance: str) -> list[str]:
        overview = await self.queue.overview()
        return next((list(queue.group_ids) for queue in overview.virtual_queues if queue.instance == instance), [])

    async def state(self, key: RequestKey) -> str:
        found = await self.queue.find(key)
        return found.state.name
