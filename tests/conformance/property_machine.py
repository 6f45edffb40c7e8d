"""All scripts driven by two planners and several agents that crash, wake up as zombies and lose answers, in any order."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from qlm_core.vocabulary.pauses import PauseKind
from qlm_core.vocabulary.request import RequestKey, RequestState
from qlm_queue.values import (
    BATCH_MAX,
    PLANNER_ROLE,
    AcceptReceipt,
    PlanChunk,
    PullBudget,
    QueueSegment,
    RequeueCause,
    StepStatus,
    WaitingRequest,
)

from .property_driver import answer_of, top_of
from .property_world import AGENTS_MAX, GROUPS, INSTANCES, KEYS, QUEUES, Agent, Planner, QueueWorld, Run
from .scenario import CANCELLED, EXPIRED, FAILURE, TTL_S, acceptance, completion, emission, happening, owned, placement

pick = st.integers(0, 999)
lost = st.sampled_from(("heard", "heard", "heard", "repeated", "unheard"))
"""Fate of an answer: heard; lost, and the call repeated; lost, and the caller continues without."""
causes = st.sampled_from(list(RequeueCause))


class QueueMachine(QueueWorld):
    """The rules. `index` picks an actor or a thing, whatever there is."""

    @initialize()
    def begin(self) -> None:
        self.elect(0)
        for instance in INSTANCES:
            self.start_agent(instance, "heard")
        for index in range(2):
            self.serve(index, 2)

    def _some_key(self, index: int) -> RequestKey:
        """Mostly that of a live request."""
        live = self.driver.state.requests
        return live[index % len(live)].key if live and index % 5 else KEYS[index % len(KEYS)]

    # Trouble --------------------------------------------------------------------------------------------------------------

    @rule(
        index=pick,
        kind=st.sampled_from(("elect", "depose", "crash", "crash", "end", "deregister", "forget instance", "window", "pause", "resume")),
    )
    def trouble(self, index: int, kind: str) -> None:
        """One rule, so that most steps are none."""
        agent = self.agents[index % len(self.agents)]
        lease = self._planner(index).lease
        terminals = self.driver.state.terminals
        match kind:
            case "elect":
                self.elect(index)
            case "depose":  # the leader stops for longer than its lease; it does not know
                self.driver.hook("expire_lease", PLANNER_ROLE)
            case "crash":  # an agent stops for longer than its lease: it stays among the agents as a zombie
                self.driver.hook("expire_lease", agent.lease.role)
            case "end":  # the process of a zombie ends
                if agent not in self.alive() and len(self.agents) > 1:
                    self.agents.remove(agent)
            case "deregister":
                self.call("deregister", agent.lease)
            case "forget instance":
                assert lease is not None
                self.call("forget_instance", lease, INSTANCES[index % len(INSTANCES)])
            case "pause" | "resume":
                what = ((PauseKind.MODEL, "m"), (PauseKind.TENANT, KEYS[index % len(KEYS)].tenant))[index // len(KEYS) % 2]
                changed = self.call(kind, *what)
                assert changed == ((what in self.paused) == (kind == "resume"))
                self.paused ^= {what} if changed else set()
            case _:  # a result's window is over, and its request id is free again
                if terminals:
                    record = terminals[index % len(terminals)]
                    self.forgotten.add(record.queue_id)
                    self.driver.hook("expire_result", record.key)

    @precondition(lambda self: len(self.agents) < AGENTS_MAX)
    @rule(instance=st.sampled_from(INSTANCES), answer=lost)
    def start(self, instance: str, answer: str) -> None:
        self.start_agent(instance, answer)

    @rule(index=pick)
    def renew(self, index: int) -> None:
        agent = self.agents[index % len(self.agents)]
        holds = agent in self.alive()
        outcome = self.call("renew_lease", agent.lease, TTL_S)
        assert holds == (outcome is None), "an expired lease was renewed, or a live one was not"

    # Gateways ---------------------------------------------------------------------------------------------------------------

    @rule(
        index=pick,
        salt=st.sampled_from(("", "", "", "other")),
        slo_class=st.sampled_from(("1s", "64s")),
        expires=st.booleans(),
        answer=lost,
    )
    def accept(self, index: int, salt: str, slo_class: str, expires: bool, answer: str) -> None:
        key = KEYS[index % len(KEYS)]
        wanted = acceptance(
            key,
            model="m" if index % 3 else "n",
            gateway=f"g{index % 2}",
            slo_class=slo_class,
            prompt_tokens=1 + index % 7,
            expire_after_s=3_000.0 if expires else None,
            salt=salt,
        )
        known = any(request.key == key for request in self.driver.state.requests)
        receipt = self.call("accept", wanted, answer=answer)
        self.remember_accepted()
        if isinstance(receipt, AcceptReceipt) and answer == "heard":
            assert receipt.duplicate or not known

    @rule(index=pick, answer=lost)
    def cancel(self, index: int, answer: str) -> None:
        self.call("cancel", self._some_key(index), CANCELLED, answer=answer)

    @rule(index=pick, noticed=st.booleans(), answer=lost)
    def expire(self, index: int, noticed: bool, answer: str) -> None:
        """Expiries pass; nobody needs to notice at once."""
        for offset in range(3):
            self.driver.hook("expire_request", KEYS[(index + offset) % len(KEYS)])
        if noticed:
            self.call("expire", EXPIRED, answer=answer)

    @rule(index=pick, gateway=st.sampled_from(("", "g0", "g1")), offset=st.sampled_from((0, 0, 4, 9)), answer=lost)
    def attach(self, index: int, gateway: str, offset: int, answer: str) -> None:
        key = self._some_key(index)
        for request in self.driver.state.requests:
            if request.key == key and gateway not in ("", request.gateway):
                self.driver.rebound.add(request.queue_id)
        self.call("attach", key, gateway, offset, answer=answer)

    # Planners ---------------------------------------------------------------------------------------------------------------

    @rule(index=pick, count=st.integers(1, 4), answer=lost)
    def read_arrivals(self, index: int, count: int, answer: str) -> None:
        for request in self.call("read_arrivals", 0, count, answer=answer) or ():
            self.planners[index % 2].requests[request.queue_id] = request

    @rule(index=pick)
    def rebuild(self, index: int) -> None:
        planner = self.planners[index % 2]
        planner.requests = {request.queue_id: request for request in self.call("read_unplaced", "", 20)}
        planner.overview = self.call("overview")

    @rule(
        index=pick,
        group_id=st.sampled_from(sorted(GROUPS)),
        instance=st.sampled_from((*QUEUES, *INSTANCES)),
        before=st.sampled_from(("", "g0", "g1")),
        size=st.integers(1, 4),
        answer=lost,
    )
    def place(self, index: int, group_id: str, instance: str, before: str, size: int, answer: str) -> None:
        planner = self._planner(index)
        if not planner.requests:
            planner.requests = {request.queue_id: request for request in self.call("read_unplaced", "", 20)}
        if not planner.requests:
            return
        assert planner.lease is not None
        names = sorted(planner.requests)
        start = index % len(names)
        requests = [planner.requests[name] for name in (names + names)[start : start + min(size, len(names))]]
        last_s = float(index + index % 7 - 1)
        opened = placement(group_id, instance, before, float(index), GROUPS[group_id], 5.0 + index % 40, last_s)
        self.place_in(planner.lease, opened, requests, answer)

    @rule(index=pick)
    def poll(self, index: int) -> None:
        self.planners[index % 2].overview = self.call("overview")

    @rule(index=pick, names=st.lists(st.sampled_from((*sorted(GROUPS), "nobody")), unique=True))
    def look_at_some(self, index: int, names: list[str]) -> None:
        whole = self.call("overview")
        some = self.planners[index % 2].overview = self.call("overview", names)
        assert dict(some.groups) == {name: group for name, group in whole.groups.items() if name in names}

    @rule(
        index=pick,
        names=st.permutations(sorted(GROUPS)),
        cut=st.integers(0, 4),
        destination=st.sampled_from((*INSTANCES, *INSTANCES, "unassigned")),
        start=st.integers(0, 3),
        newer=st.integers(-1, 1),
        answer=lost,
    )
    def apply_plan(self, index: int, names: list[str], cut: int, destination: str, start: int, newer: int, answer: str) -> None:
        """Moves some groups to one queue and orders others on another, by the view that the planner has: often an old one."""
        planner = self._planner(index)
        if planner.overview is None:
            planner.overview = self.call("overview")
        assert planner.lease is not None
        versions = {queue.instance: queue.version for queue in planner.overview.virtual_queues}
        other = "b" if destination == "a" else "a"
        segments = [
            QueueSegment(instance=destination, start=start, group_ids=names[:cut]),
            QueueSegment(instance=other, start=0, group_ids=names[cut:][: index % 2]),
        ]
        version = max(0, planner.overview.plan_version + newer)
        self.call("apply_plan", planner.lease, PlanChunk(plan_version=version, versions=versions, segments=segments), answer=answer)

    @rule(
        index=pick,
        names=st.permutations(sorted(GROUPS)),
        instance=st.sampled_from((*INSTANCES, "unassigned")),
        size=st.integers(0, 4),
        answer=lost,
    )
    def regroup(self, index: int, names: list[str], instance: str, size: int, answer: str) -> None:
        """Takes requests to another group as a planner does that believes that they wait in the first one; many do not."""
        planner = self._planner(index)
        assert planner.lease is not None
        known = list(self.driver.state.requests)
        start = index % max(1, len(known))
        chosen = [WaitingRequest(queue_id=each.queue_id, key=each.key) for each in (known + known)[start : start + min(size, len(known))]]
        source, target, before = names[:3]
        into = placement(target, instance, before, float(index), GROUPS[target], slo_least_s=5.0 + index % 40)
        self.call("regroup", planner.lease, source, into, chosen, answer=answer)

    def _planner(self, index: int) -> Planner:
        """One that leads or has led."""
        led = [planner for planner in self.planners if planner.lease is not None]
        return led[index % len(led)]

    @rule(index=pick, answer=lost)
    def reclaim(self, index: int, answer: str) -> None:
        lease = self._planner(index).lease
        assert lease is not None
        self.call("reclaim", lease, self.incarnations[index % len(self.incarnations)], FAILURE, answer=answer)

    @rule(
        index=pick, name=st.sampled_from(sorted(GROUPS)), keep=st.integers(0, 2), count=st.integers(0, 3), oldest=st.booleans(), answer=lost
    )
    def shed(self, index: int, name: str, keep: int, count: int, oldest: bool, answer: str) -> None:
        """A repeat changes nothing where the first call got down to `keep`, which is how planners call it."""
        lease = self._planner(index).lease
        assert lease is not None
        self.call("shed", lease, name, keep, BATCH_MAX if answer == "repeated" else count, oldest, FAILURE, answer=answer)

    # Agents -----------------------------------------------------------------------------------------------------------------

    @rule(
        index=pick,
        count=st.integers(1, 3),
        kv_tokens=st.sampled_from((5, 12, 1_000, 1_000)),
        aside=st.integers(0, 1),
        model=st.sampled_from(("m", "m", "n", "")),
        answer=lost,
    )
    def pull(self, index: int, count: int, kv_tokens: int, aside: int, model: str, answer: str) -> None:
        budget = PullBudget(requests_max=count, kv_tokens=kv_tokens, output_reserve_tokens=2, owned_aside=aside, behind_max=3 * aside)
        self.take(self.agents[index % len(self.agents)], model, budget, answer)

    @rule(index=pick)
    def report(self, index: int) -> None:
        """A zombie may report too: its GPU did what it says."""
        self.call("report", [happening(incarnation=self.agents[index % len(self.agents)].lease.role, model="m")])

    @rule(index=pick)
    def recover(self, index: int) -> None:
        """An agent requests the list of what it owns, after answers of `pull` were lost."""
        agent = self.agents[index % len(self.agents)]
        for pulled in self.call("owned", agent.lease.role):
            if (pulled.queue_id, pulled.attempt) not in {(run.pulled.queue_id, run.pulled.attempt) for run in agent.runs}:
                agent.learn(pulled)

    def _runs(self, index: int, size: int) -> tuple[Agent, list[Run]]:
        """Some runs that some agent knows of: mostly of live requests, and often old ones of requests that it has pulled again."""
        attempts = {request.queue_id: request.attempt for request in self.driver.state.requests}

        def wanted(run: Run) -> bool:
            attempt = attempts.get(run.pulled.queue_id, 0)
            return attempt > run.pulled.attempt if index % 4 == 1 else attempt > 0 or index % 5 == 0

        known = [(agent, [run for run in agent.runs if wanted(run)]) for agent in self.agents]
        busy = [(agent, runs) for agent, runs in known if runs] or [(agent, agent.runs) for agent in self.agents if agent.runs]
        agent, runs = busy[index % len(busy)]
        start = (index // 7) % len(runs)
        return agent, (runs + runs)[start : start + min(size, len(runs))]

    @precondition(lambda self: any(agent.runs for agent in self.agents))
    @rule(index=pick, size=st.integers(1, 3), back=st.sampled_from((0, 0, 1, 2, -1)), count=st.integers(1, 4), answer=lost)
    def emit(self, index: int, size: int, back: int, count: int, answer: str) -> None:
        """`back`: the agent begins so many tokens before the first one that it believes to be new, after it has sent one that is."""
        agent, runs = self._runs(index, size)
        if back > 0:
            self._emit(agent, runs, 0, 1, "heard")
        self._emit(agent, runs, back, count, answer)

    def _emit(self, agent: Agent, runs: list[Run], back: int, count: int, answer: str) -> None:
        emissions = []
        for run in runs:
            offset = max(0, run.produced - back)
            key = run.pulled.key
            emissions.append(emission(run.pulled, offset, answer_of(key)[offset : offset + count], top=top_of(key)))
        statuses = self.call("emit", agent.lease.role, emissions, answer=answer)
        for run, sent, status in zip(runs, emissions, statuses or (), strict=False):
            if status is StepStatus.DONE:
                run.produced = max(run.produced, (sent.offset + len(sent.progress)) // 4)

    @precondition(lambda self: any(agent.runs for agent in self.agents))
    @rule(index=pick, size=st.integers(1, 2), back=st.integers(0, 2), fails=st.sampled_from((False, False, True)), answer=lost)
    def complete(self, index: int, size: int, back: int, fails: bool, answer: str) -> None:
        agent, runs = self._runs(index, size)
        state = RequestState.FAILED if fails else RequestState.COMPLETED
        completions = []
        for run in runs:
            offset = max(0, run.produced - back)
            rest = answer_of(run.pulled.key)[offset:]
            completions.append(completion(run.pulled, offset, rest[:1] if fails else rest, state=state, top=top_of(run.pulled.key)))
        self.call("complete", agent.lease.role, completions, answer=answer)

    @precondition(lambda self: any(agent.runs for agent in self.agents))
    @rule(index=pick, size=st.integers(1, 3), cause=st.none() | causes, answer=lost, again=st.sampled_from((True, True, False)))
    def give_back(self, index: int, size: int, cause: RequeueCause | None, answer: str, again: bool) -> None:
        """Unpulls (no cause) or requeues; and `again` pulls at once, which makes older attempts of the same incarnation."""
        agent, runs = self._runs(index, size)
        items = [owned(run.pulled) for run in runs]
        if cause is None:
            self.call("unpull", agent.lease.role, items, index % 2 == 1, answer=answer)
        else:
            self.call("requeue", agent.lease.role, items, cause, FAILURE, answer=answer)
        if again:
            budget = PullBudget(requests_max=3, kv_tokens=1_000, output_reserve_tokens=2)
            self.take(agent, GROUPS[runs[0].pulled.group_id], budget, "heard")

    @rule(index=pick, size=st.integers(1, 3))
    def serve(self, index: int, size: int) -> None:
        """Brings new requests all the way to an agent, so that the rules above find something to do."""
        for offset in range(size):
            self.accept(index + offset, "", "1s", bool(offset), "heard")
        alive = self.alive()
        agent = alive[index % len(alive)] if alive else self.start_agent(INSTANCES[index % len(INSTANCES)], "heard")
        group_id = sorted(GROUPS)[index % len(GROUPS)]
        instance = agent.lease.role.partition("/")[0]
        unplaced = self.call("read_unplaced", "", 4)
        self.place_in(self.leading(), placement(group_id, instance, "", 5.0, GROUPS[group_id]), unplaced, "heard")
        self.take(agent, GROUPS[group_id], PullBudget(requests_max=3, kv_tokens=1_000, output_reserve_tokens=2), "heard")
