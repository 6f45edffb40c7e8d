"""A machine with a hand-moved clock whose effects are written down as short lines, so that a test reads as a conversation."""

from __future__ import annotations

from typing import assert_never

from qlm_agent.effects import (
    AbortRuns,
    Complete,
    Deregister,
    Describe,
    DrainAnswer,
    Effect,
    Emit,
    ForgetRun,
    GiveBack,
    LoadAnswer,
    LoadModel,
    PauseEngine,
    Pull,
    ReadOwned,
    Register,
    ResumeEngine,
    StartRun,
    Stop,
)
from qlm_agent.engine import FailureKind, FinishReason, Tier
from qlm_agent.events import (
    CallAnswered,
    CallLost,
    EngineEnd,
    EngineTold,
    Event,
    ItemsAnswered,
    ModelLoaded,
    Outcome,
    OwnedAnswered,
    PullAnswered,
    PulledRun,
    Registered,
    Started,
    TimePassed,
)
from qlm_agent.machine import AgentMachine
from qlm_agent.machine_settings import MachineSettings

CAPACITY = 10_000


def pulled(name: str, *, model: str = "m", prompt: int = 100, output_max: int = 500, stored: int = 0, refusal: str = "") -> PulledRun:
    return PulledRun(
        run_id=f"{name}/1", queue_id=name, model=model, prompt_tokens=prompt, output_tokens_max=output_max, stored=stored, refusal=refusal
    )


def ended(name: str, tokens: int = 0, *, failure: FailureKind | None = None) -> EngineEnd:
    finish = FinishReason.STOP if failure is None else None
    return EngineEnd(run_id=f"{name}/1", tokens=tokens, finish=finish, failure=failure, message="" if failure is None else "broken")


class Transcript:
    """Steps a machine. Calls to the server are open until a test answers them by kind: `answer_pull`, `answer_items`, `lose`."""

    def __init__(self, *models: str, **settings: object) -> None:
        quiet = {"poll_s": 1000.0, "owned_check_s": 1000.0}  # so that only what a test is about is heard
        self.machine = AgentMachine(MachineSettings(models=models or ("m", "n"), **{**quiet, **settings}))  # type: ignore[arg-type]
        self.now_s = 0.0
        self.calls: dict[str, int] = {}
        self.pull: Pull | None = None

    def at(self, now_s: float) -> Transcript:
        self.now_s = now_s
        return self

    def step(self, event: Event) -> list[str]:
        effects = self.machine.step(self.now_s, event)
        return [self._line(effect) for effect in effects]

    def wake(self) -> list[str]:
        """At the time that the machine asked for."""
        wakeup_s = self.machine.next_wakeup_s
        assert wakeup_s is not None
        assert wakeup_s > self.now_s
        return self.at(wakeup_s).step(TimePassed())

    # Shortcuts --------------------------------------------------------------------------------------------------------

    def register(self) -> list[str]:
        if "register" not in self.calls:
            assert self.step(Started()) == ["register"]
        return self.step(Registered(call=self.calls.pop("register"), incarnation="a/1"))

    def serve(self, model: str = "m") -> list[str]:
        """Registered, with a model active that the head of the queue is of; the first pull is open."""
        assert self.register() == ["pull nothing"]
        assert self.answer_pull(head=model) == [f"load {model} active"]
        return self.loaded(model)

    def loaded(self, model: str, tier: Tier = Tier.ACTIVE, *, active: str | None = None, warm: tuple[str, ...] = ()) -> list[str]:
        now_active = model if active is None else active
        return self.step(ModelLoaded(model=model, tier=tier, took_s=1.0, active=now_active, warm=warm, kv_capacity_tokens=CAPACITY))

    def answer_pull(self, *runs: PulledRun, head: str = "", blocked: int = 0) -> list[str]:
        call = self.calls.pop("pull")
        group = f"group-{head}" if head else ""
        return self.step(PullAnswered(call=call, pulled=runs, head_group=group, head_model=head, blocked_tokens=blocked))

    def answer_owned(self, *runs: PulledRun) -> list[str]:
        return self.step(OwnedAnswered(call=self.calls.pop("read owned"), owned=runs))

    def answer_items(self, kind: str, *outcomes: Outcome) -> list[str]:
        """To the open emit, complete or give back."""
        return self.step(ItemsAnswered(call=self.calls.pop(kind), outcomes=outcomes))

    def answer(self, kind: str) -> list[str]:
        return self.step(CallAnswered(call=self.calls.pop(kind)))

    def lose(self, kind: str) -> list[str]:
        return self.step(CallLost(call=self.calls.pop(kind)))

    def produce(self, *counts: tuple[str, int]) -> list[str]:
        return self.step(EngineTold(counts=[(f"{name}/1", tokens) for name, tokens in counts]))

    def end(self, *ends: EngineEnd) -> list[str]:
        return self.step(EngineTold(ended=ends))

    # Lines ------------------------------------------------------------------------------------------------------------

    def _open(self, kind: str, call: int, line: str = "") -> str:
        assert kind not in self.calls, f"two open calls: {kind}"
        self.calls[kind] = call
        return line or kind

    def _line(self, effect: Effect) -> str:
        match effect:
            case Register():
                return self._open("register", effect.call)
            case Describe():
                return self._open("describe", effect.call)
            case Deregister():
                return self._open("deregister", effect.call)
            case Pull():
                self.pull = effect
                return self._open("pull", effect.call, f"pull {effect.model} x{effect.requests_max}" if effect.model else "pull nothing")
            case ReadOwned():
                return self._open("read owned", effect.call)
            case Emit():
                parts = " ".join(f"{_name(item.run_id)}[{item.start}:{item.end}]" for item in effect.items)
                return self._open("emit", effect.call, f"emit {parts}")
            case Complete():
                parts = " ".join(
                    f"{_name(item.run_id)}[{item.start}:{item.end}]={item.ending.reason or item.ending.finish.name}"  # type: ignore[union-attr]
                    for item in effect.items
                )
                return self._open("complete", effect.call, f"complete {parts}")
            case GiveBack():
                names = " ".join(map(_name, effect.run_ids))
                return self._open("give back", effect.call, f"give back {names} {effect.cause}")
            case StartRun():
                return f"start {_name(effect.run_id)}"
            case AbortRuns():
                return "abort " + " ".join(map(_name, effect.run_ids))
            case LoadModel():
                return f"load {effect.model} {effect.tier}"
            case PauseEngine():
                return "pause"
            case ResumeEngine():
                return "resume"
            case ForgetRun():
                return f"forget {_name(effect.run_id)} {effect.fate.value}"
            case DrainAnswer():
                return f"drained {effect.finished} finished {effect.given_back} given back"
            case LoadAnswer():
                return f"answer {effect.ask} {effect.problem or 'done'}"
            case Stop():
                return "stop"
            case _:
                assert_never(effect)


def _name(run_id: str) -> str:
    return run_id.partition("/")[0]
