"""A machine with a hand-moved clock whose effects are written down as short lines, so that a test reads as a conversation."""

from __future__ import annotations

import math
from typing import assert_never

from qlm_agent.decisions.effects import (
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
    OffloadRuns,
    PauseEngine,
    Pull,
    ReadOwned,
    Register,
    RestoreRuns,
    ResumeEngine,
    StartRun,
    Stop,
)
from qlm_agent.decisions.events import (
    AgentStart,
    CallAnswered,
    CallLost,
    EngineEnd,
    EngineProgress,
    Event,
    ItemsAnswered,
    ModelLoaded,
    Outcome,
    OwnedAnswered,
    PullAnswered,
    PulledRun,
    QueueHead,
    RegisterAnswer,
    RunsOffloaded,
    RunsRestored,
    TimePassed,
    WaitingGroup,
)
from qlm_agent.decisions.machine import AgentMachine
from qlm_agent.decisions.settings import MachineSettings
from qlm_agent.engines.port import FailureKind, FinishReason, Tier
from qlm_core.profiles.profile import HardwareProfile

CAPACITY = 10_000


def profile(
    model: str, *, token_ms: float = 10.0, weights_gb: float = 10.0, kv_swap_us: float = 10.0, recompute_us: float = 100.0
) -> HardwareProfile:
    """A GPU whose every figure is easy to count with: 1 s from host memory, 4 s more from disk."""
    return HardwareProfile(
        gpu="g",
        n_gpu=1,
        model=model,
        weights_gb=weights_gb,
        kv_bytes_per_token=1,
        kv_capacity_tokens=CAPACITY,
        decode_a_ms=token_ms,
        decode_b_ms_per_seq=0.0,
        decode_c_ms_per_context_token=0.0,
        prefill_base_ms=0.0,
        prefill_ms_per_token=recompute_us * 1e-3,
        load_disk_to_cpu_s=4.0,
        load_cpu_to_gpu_s=1.0,
        kv_swap_us_per_token=kv_swap_us,
        recompute_us_per_token=recompute_us,
    )


HARDWARE = {model: profile(model) for model in ("m", "n", "o", "p")}


def pulled(
    name: str,
    *,
    model: str = "m",
    prompt: int = 100,
    output_max: int = 500,
    stored: int = 0,
    refusal: str = "",
    due: float = math.inf,
    priority: int | None = None,
    resumable: bool = True,
    displacements: int = 0,
) -> PulledRun:
    return PulledRun(
        run_id=f"{name}/1",
        queue_id=name,
        model=model,
        prompt_tokens=prompt,
        output_tokens_max=output_max,
        stored=stored,
        refusal=refusal,
        deadline_s=due,
        priority=priority,
        resumable=resumable,
        displacements=displacements,
    )


def waiting_groups(*models: str) -> tuple[WaitingGroup, ...]:
    """Groups behind the head, of one request each."""
    return tuple(WaitingGroup(model=model, slo_class="64s", first_token=False, waiting=1, first_deadline_s=1e9) for model in models)


def group(
    model: str,
    *,
    name: str = "",
    waiting: int = 1,
    prompt: int = 100,
    due: float = math.inf,
    priority: int | None = None,
    first_token: bool = False,
) -> QueueHead:
    """The head of the virtual queue: `waiting` requests of `prompt` tokens."""
    return QueueHead(
        group_id=name or f"group-{model}",
        model=model,
        waiting=waiting,
        waiting_prompt_tokens=waiting * prompt,
        first_deadline_s=due,
        priority=priority,
        first_token=first_token,
    )


def ended(name: str, tokens: int = 0, *, failure: FailureKind | None = None) -> EngineEnd:
    finish = FinishReason.STOP if failure is None else None
    return EngineEnd(run_id=f"{name}/1", tokens=tokens, finish=finish, failure=failure, message="" if failure is None else "broken")


class Transcript:
    """Steps a machine. Calls to the server are open until a test answers them by kind: `answer_pull`, `answer_items`, `lose`."""

    def __init__(self, *models: str, **settings: object) -> None:
        """`host_kv_tokens`: KV that the engine can hold in host memory; the other settings are the machine's."""
        self.host_kv_tokens = int(str(settings.pop("host_kv_tokens", 0)))
        quiet = {"poll_s": 1000.0, "owned_check_s": 1000.0, "host_memory_gb": 100.0}  # so that a test has only its own events
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
        """At the machine's next wakeup."""
        wakeup_s = self.machine.next_wakeup_s
        assert wakeup_s is not None
        assert wakeup_s > self.now_s
        return self.at(wakeup_s).step(TimePassed())

    # Shortcuts --------------------------------------------------------------------------------------------------------

    def register(self) -> list[str]:
        if "register" not in self.calls:
            assert self.step(AgentStart()) == ["register"]
        return self.step(RegisterAnswer(call=self.calls.pop("register"), incarnation="a/1"))

    def serve(self, model: str = "m") -> list[str]:
        """Registered, with a model active that the head of the queue is of; the first pull is open."""
        assert self.register() == ["pull nothing"]
        assert self.answer_pull(head=model) == [f"load {model} active"]
        return self.loaded(model)

    def loaded(self, model: str, tier: Tier = Tier.ACTIVE, *, active: str | None = None, warm: tuple[str, ...] = ()) -> list[str]:
        return self.step(
            ModelLoaded(
                model=model,
                tier=tier,
                took_s=1.0,
                active=model if active is None else active,
                warm=warm,
                kv_capacity_tokens=CAPACITY,
                host_kv_capacity_tokens=self.host_kv_tokens,
            )
        )

    def answer_pull(self, *runs: PulledRun, head: str | QueueHead = "", blocked: int = 0, ahead: tuple[str, ...] = ()) -> list[str]:
        """`head`: its model will do where nothing else matters."""
        found = (group(head) if head else None) if isinstance(head, str) else head
        call = self.calls.pop("pull")
        return self.step(PullAnswered(call=call, pulled=runs, head=found, blocked_tokens=blocked, behind=waiting_groups(*ahead)))

    def offloaded(self, *names: str, requested: tuple[str, ...] = ()) -> list[str]:
        """The engine moved the KV of these, of those `requested` (all of them where none is named)."""
        return self.step(RunsOffloaded(requested=_ids(requested or names), done=_ids(names)))

    def restored(self, *names: str, requested: tuple[str, ...] = ()) -> list[str]:
        return self.step(RunsRestored(requested=_ids(requested or names), done=_ids(names)))

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
        return self.step(EngineProgress(counts=[(f"{name}/1", tokens) for name, tokens in counts]))

    def end(self, *ends: EngineEnd) -> list[str]:
        return self.step(EngineProgress(ended=ends))

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
            case OffloadRuns():
                return "offload " + " ".join(map(_name, effect.run_ids))
            case RestoreRuns():
                return "restore " + " ".join(map(_name, effect.run_ids))
            case LoadModel():
                return f"load {effect.model} {effect.tier}"
            case PauseEngine():
                return "pause"
            case ResumeEngine():
                return "resume"
            case ForgetRun():
                return f"forget {_name(effect.run_id)} {effect.cause.value}"
            case DrainAnswer():
                return f"drained {effect.finished} finished {effect.given_back} given back"
            case LoadAnswer():
                return f"answer {effect.caller} {effect.problem or 'done'}"
            case Stop():
                return "stop"
            case _:
                assert_never(effect)


def _name(run_id: str) -> str:
    return run_id.partition("/")[0]


def _ids(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}/1" for name in names)
