"""The machine alone, by hand: its events (>), and its effects (<)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qlm_core.vocabulary.instance import UNASSIGNED, InstanceFacts
from qlm_core.vocabulary.request import RequestFacts, RequestKey, Slo, SloKind
from qlm_planner.board.group import to_meta, traits_of
from qlm_planner.board.snapshot import Arrival, InstanceRow, QueueRow, Snapshot
from qlm_planner.machine.effects import (
    ApplyChunk,
    Effect,
    Expire,
    JobEnded,
    Place,
    PlanApplied,
    PlanChanged,
    PublishWaits,
    ReadArrivals,
    ReadEvents,
    ReadOverview,
    ReadUnplaced,
    Reclaim,
    Solve,
)
from qlm_planner.machine.events import (
    ArrivalsRead,
    CallFailed,
    Change,
    ChangeKind,
    ChunkAnswered,
    Event,
    EventEntry,
    EventsRead,
    ExpirySwept,
    OverviewRead,
    PlaceAnswered,
    ProfilesRead,
    Reclaimed,
    Tick,
    UnplacedRead,
)
from qlm_planner.machine.step import PlannerMachine
from qlm_planner.policy import Policy
from qlm_queue.values import GroupRecord

from .world import CATALOGUE, START_S, profiles


def arrival(number: int, model: str = "alpha", slo_s: float = 60.0) -> Arrival:
    return Arrival(
        facts=RequestFacts(
            queue_id=f"{number}-0",
            key=RequestKey("t", str(number)),
            acceptance_number=number,
            accepted_s=START_S,
            model=model,
            slo=Slo(kind=SloKind.COMPLETION, seconds=slo_s),
            prompt_tokens=200,
            output_tokens_max=256,
        )
    )


def snapshot(
    queues: Mapping[str, Sequence[str]],
    *,
    lost: Sequence[str] = (),
    owning: Mapping[str, bool] | None = None,
    models: Mapping[str, str] | None = None,
    last_event: tuple[int, int] = (0, 0),
) -> Snapshot:
    """Groups of 10 waiting requests each; `models`: of groups other than alpha's."""
    groups = {}
    for instance, group_ids in queues.items():
        for number, group_id in enumerate(group_ids):
            traits = traits_of(arrival(number, (models or {}).get(group_id, "alpha")).facts)
            groups[group_id] = GroupRecord(
                group_id=group_id,
                instance=instance,
                last_instance=instance,
                waiting=10,
                live=10,
                waiting_prompt_tokens=2000,
                first_deadline_s=START_S + 60.0 + number,
                next_deadline_s=START_S + 60.0 + number,
                last_deadline_s=START_S + 70.0 + number,
                slo_least_s=traits.slo_s,
                meta=to_meta(traits, 0),
            )
    facts = [
        InstanceFacts(name=name, incarnation=f"{name}/1", gpu="big", n_gpu=1, engine="simulated", models=("alpha", "beta"))
        for name in queues
        if name != UNASSIGNED
    ]
    return Snapshot(
        plan_version=4,
        unplaced=0,
        queues=tuple(QueueRow(instance=name, version=7, group_ids=tuple(ids), running=0) for name, ids in queues.items()),
        groups=groups,
        instances=tuple(InstanceRow(facts=each, alive=each.name not in lost) for each in facts),
        incarnations=owning or {},
        last_event_id=last_event,
    )


def describe(effect: Effect) -> str:
    match effect:
        case Place(groups=groups, requests=requests):
            where = " ".join(f"{group.group_id}@{group.instance}<{group.before or 'end'}" for group in groups)
            return f"place {len(requests)}: {where}"
        case ApplyChunk(plan_version=version, versions=versions, segments=segments):
            moves = " ".join(f"{segment.instance}[{segment.start}]={','.join(segment.group_ids)}" for segment in segments)
            return f"apply v{version} {dict(versions)} {moves}"
        case ReadOverview():
            return "overview"
        case ReadUnplaced(after=after):
            return f"unplaced after {after or 'the start'}"
        case ReadArrivals():
            return "arrivals"
        case ReadEvents(after=after):
            return f"events after {after}"
        case Reclaim(incarnation=incarnation):
            return f"reclaim {incarnation}"
        case Expire():
            return "expire"
        case PlanChanged(plan_version=version):
            return f"plan v{version}"
        case PlanApplied(cause=cause, whole=whole, chunks=chunks, groups_named=named, groups_moved=moved):
            return f"{cause} {'done' if whole else 'left'}: {chunks} chunks, {named} named, {moved} moved"
        case Solve(job=job, stage=stage, problem=problem):
            return f"solve {job}: {stage}, {problem.groups} groups"
        case JobEnded(job=job, outcome=outcome):
            return f"job {job}: {outcome}"
    return type(effect).__name__


class Script:
    """Steps a machine and writes down what it wants."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.machine = PlannerMachine(policy or Policy(lease_ttl_s=3.0), 9, START_S)
        self.last: list[Effect] = []

    def at(self, after_s: float, event: Event) -> list[str]:
        self.last = self.machine.step(START_S + after_s, event)
        return [describe(effect) for effect in self.last]

    def rest(self, after_s: float) -> list[str]:
        """Ticks until nothing more is due: the waits are published in pieces."""
        effects: list[str] = []
        while self.machine.wake_s <= START_S + after_s:
            effects += self.at(after_s, Tick())
        return effects


def test_a_leader_rebuilds_then_reads() -> None:
    script = Script()
    assert script.at(0.0, ProfilesRead(catalogue=CATALOGUE, profiles=profiles())) == ["overview"]
    # Nothing else until the queue is known. Then the scan for what another planner read and did not place.
    assert script.at(0.1, Tick()) == []
    assert script.at(0.2, OverviewRead(snapshot=snapshot({"a": ["g8-1"]}, last_event=(5, 1)))) == [
        "unplaced after the start",
        "events after 5-1",
        "expire",
        "plan v4",
    ]
    assert "PublishWaits" in script.rest(0.2)
    # The page is placed while the next page is read; g8-1 was opened by the leader before and takes it.
    assert script.at(0.3, UnplacedRead(arrivals=(arrival(20), arrival(21)), read_to="21-0")) == [
        "place 2: g8-1@a<end",
        "unplaced after 21-0",
    ]
    place = script.last[0]
    assert isinstance(place, Place)
    assert script.at(0.4, PlaceAnswered(call=place, done=(True, True))) == ["plan v4"]
    assert script.at(0.5, UnplacedRead(arrivals=(), read_to="")) == ["arrivals"]
    assert script.machine.caught_up
    # Requests of the scan are not taken a second time.
    assert script.at(0.6, ArrivalsRead(arrivals=(arrival(21), arrival(22)))) == ["place 1: g8-1@a<end", "arrivals"]


def test_a_publication_without_waits_is_one_step() -> None:
    script = Script(Policy(publishes_waits=False))
    script.at(0.0, ProfilesRead(catalogue=CATALOGUE, profiles=profiles()))
    script.at(0.2, OverviewRead(snapshot=snapshot({"a": ["g8-1"]}, last_event=(5, 1))))
    published = [effect for effect in script.last if isinstance(effect, PublishWaits)]
    assert [(each.waits.queues, each.waits.classes) for each in published] == [((), ())]


def leading(script: Script, start: Snapshot) -> None:
    script.at(0.0, ProfilesRead(catalogue=CATALOGUE, profiles=profiles()))
    script.at(0.0, OverviewRead(snapshot=start))
    script.at(0.0, UnplacedRead(arrivals=(), read_to=""))
    script.at(0.0, ExpirySwept(count=0))
    script.rest(0.0)


def test_events_are_read_in_bundles() -> None:
    script = Script(Policy(lease_ttl_s=3.0, overview_every_s=100.0, expire_every_s=100.0, events_gap_s=0.25, events_max=2))
    leading(script, snapshot({"a": []}, last_event=(5, 1)))
    entry = EventEntry(entry_id=(6, 0), changes=())
    assert script.at(1.0, EventsRead(entries=(entry,))) == ["plan v4"]
    assert script.machine.wake_s == START_S + 1.25
    assert script.at(1.2, Tick()) == []
    assert script.at(1.25, Tick()) == ["events after 6-0"]
    # Where a read was full there is more at once.
    later = EventEntry(entry_id=(7, 0), changes=())
    assert script.at(1.3, EventsRead(entries=(later, later))) == ["events after 7-0", "plan v4"]


def test_requests_gather_while_a_call_is_under_way() -> None:
    script = Script()
    leading(script, snapshot({"a": []}))
    assert script.at(0.1, ArrivalsRead(arrivals=(arrival(1),))) == ["place 1: g9-1@a<end", "arrivals"]
    first = script.last[0]
    assert isinstance(first, Place)
    assert script.at(0.11, ArrivalsRead(arrivals=(arrival(2), arrival(3)))) == ["arrivals"]
    assert script.at(0.12, ArrivalsRead(arrivals=(arrival(4, "beta"),))) == ["arrivals"]
    assert script.at(0.13, PlaceAnswered(call=first, done=(True,))) == ["place 3: g9-2@a<end g9-1@a<g9-2", "plan v4"]


def test_events_and_overviews_are_brought_into_one_order() -> None:
    """A pull that an overview under way does not hold yet is counted on top of it; one that it holds is not counted again."""
    script = Script(Policy(lease_ttl_s=3.0, overview_every_s=0.5))
    leading(script, snapshot({"a": ["g8-1"]}, last_event=(5, 0)))
    waiting = script.machine.board.groups["g8-1"]
    assert "overview" in script.at(0.6, Tick())

    def pulls(entry: tuple[int, int], count: int) -> EventsRead:
        change = Change(kind=ChangeKind.PULLED, group_id="g8-1", incarnation="a/1", prompt_tokens=200)
        return EventsRead(entries=(EventEntry(entry_id=entry, changes=(change,) * count),))

    script.at(0.61, pulls((6, 0), 3))
    assert waiting.waiting == 7
    script.at(0.62, OverviewRead(snapshot=snapshot({"a": ["g8-1"]}, last_event=(5, 9))))
    assert script.machine.board.groups["g8-1"].waiting == 7
    assert script.at(0.63, pulls((7, 0), 2))[-1] == "plan v4"
    assert script.machine.board.groups["g8-1"].waiting == 5
    script.at(1.2, Tick())
    script.at(1.21, OverviewRead(snapshot=snapshot({"a": ["g8-1"]}, last_event=(8, 0))))
    script.at(1.22, pulls((8, 0), 4))
    assert script.machine.board.groups["g8-1"].waiting == 10


def test_a_lost_instance_in_order() -> None:
    """First what ran is taken back to its groups, then the groups move, on the versions of an overview that saw that."""
    script = Script(Policy(lease_ttl_s=3.0, overview_every_s=5.0))
    both = {"a": ["g8-1", "g8-2"], "b": ["g8-3"]}
    leading(script, snapshot(both))
    gone = snapshot(both, lost=["a"], owning={"a/1": False})
    assert script.at(5.1, Tick()) == ["overview", "expire"]
    assert script.at(5.2, OverviewRead(snapshot=gone)) == ["reclaim a/1"]
    assert script.at(5.3, Reclaimed(incarnation="a/1", count=500)) == ["reclaim a/1"]
    assert script.at(5.4, Reclaimed(incarnation="a/1", count=0)) == ["overview"]
    assert script.at(5.5, OverviewRead(snapshot=snapshot(both, lost=["a"]))) == ["apply v5 {'a': 7, 'b': 7} b[1]=g8-1,g8-2"]
    chunk = script.last[0]
    assert isinstance(chunk, ApplyChunk)
    assert script.at(5.6, ChunkAnswered(call=chunk, applied=True, versions={"a": 8, "b": 8}, moved=2)) == [
        "plan v5",
        "relocate done: 1 chunks, 2 named, 2 moved",
    ]
    assert script.machine.board.queues["b"] == ["g8-3", "g8-1", "g8-2"]
    assert script.machine.board.versions["b"] == 8


def test_calls_that_fail_are_repeated_after_a_pause() -> None:
    script = Script()
    leading(script, snapshot({"a": []}))
    script.at(0.1, ArrivalsRead(arrivals=(arrival(1),)))
    place = script.last[0]
    assert isinstance(place, Place)
    assert script.at(0.2, CallFailed(call=place)) == []
    assert script.machine.wake_s == START_S + 0.2 + 0.05
    # The placement as it was, and only then an overview: it states the outcome of both.
    assert script.at(0.25, Tick()) == ["place 1: g9-1@a<end"]
    assert script.at(0.3, PlaceAnswered(call=place, done=(True,))) == ["overview", "plan v4"]


def test_arrivals_that_may_be_lost_are_looked_for() -> None:
    """A read whose answer was lost has given its requests to nobody: they are pending there, and only a scan finds them."""
    script = Script()
    leading(script, snapshot({"a": []}))
    assert script.at(0.1, CallFailed(call=ReadArrivals(count=500, block_s=1.0))) == []
    assert script.at(0.2, Tick()) == ["overview", "unplaced after the start"]
    assert script.at(0.4, UnplacedRead(arrivals=(), read_to="")) == ["arrivals"]


def test_a_scan_that_begins_anew_forgets_the_page_under_way() -> None:
    """Its answer says nothing of those before it: the new scan reads them all, from the start."""
    script = Script()
    leading(script, snapshot({"a": []}))
    script.at(0.1, CallFailed(call=ReadArrivals(count=500, block_s=1.0)))
    assert "unplaced after the start" in script.at(0.2, Tick())
    script.machine.arrivals.rescan()
    assert script.at(0.3, UnplacedRead(arrivals=(), read_to="")) == ["unplaced after the start"]
    assert script.machine.arrivals.scanning


def test_a_page_that_failed_is_read_again() -> None:
    script = Script()
    script.at(0.0, ProfilesRead(catalogue=CATALOGUE, profiles=profiles()))
    script.at(0.0, OverviewRead(snapshot=snapshot({"a": []})))
    assert script.at(0.1, UnplacedRead(arrivals=(arrival(1),), read_to="1-0")) == ["place 1: g9-1@a<end", "unplaced after 1-0"]
    place = script.last[0]
    assert isinstance(place, Place)
    script.at(0.2, CallFailed(call=ReadUnplaced(after="1-0", count=500)))
    assert "unplaced after 1-0" in script.at(0.3, PlaceAnswered(call=place, done=(True,)))
