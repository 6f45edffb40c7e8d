"""What becomes of a request when the agent comes to own it: it starts, ends at once, or goes back."""

from __future__ import annotations

from qlm_agent.delivery import Delivery
from qlm_agent.effects import Effect, StartRun
from qlm_agent.engine import FinishReason
from qlm_agent.events import PulledRun
from qlm_agent.expectations import Expectations
from qlm_agent.machine_settings import MachineSettings
from qlm_agent.runs import Ending, ReturnCause, Run, RunTable
from qlm_agent.swapping import Swapping
from qlm_core.preemption import Urgency


class Intake:
    """See the module."""

    def __init__(
        self, settings: MachineSettings, runs: RunTable, delivery: Delivery, expectations: Expectations, swapping: Swapping
    ) -> None:
        self._settings = settings
        self._runs = runs
        self._delivery = delivery
        self._expectations = expectations
        self._swapping = swapping

    def own(self, pulled: PulledRun, *, serving: bool) -> list[Effect]:
        """Takes a run that was not known. `serving`: the agent may start something."""
        if pulled.run_id in self._runs:
            return []
        run = self._run(pulled)
        self._runs.add(run)
        if pulled.refusal:
            self._delivery.ended(run, Ending(reason="ENGINE_FAILURE", message=pulled.refusal))
        elif run.stored >= run.output_tokens_max:
            # An earlier attempt made all of it and was lost before it could say so.
            self._delivery.ended(run, Ending(finish=FinishReason.LENGTH))
        elif not serving or run.model != self._swapping.active or self._swapping.swapping_to:
            self._delivery.give_back(run, ReturnCause.UNSTARTED)
        elif run.prompt_tokens + run.stored + 1 > self._swapping.kv_capacity_tokens:
            message = f"{run.prompt_tokens + run.stored} tokens do not fit in {self._swapping.kv_capacity_tokens} tokens of KV"
            self._delivery.ended(run, Ending(reason="KV_CAPACITY_EXCEEDED", message=message))
        else:
            return [StartRun(run_id=run.run_id)]
        return []

    def _run(self, pulled: PulledRun) -> Run:
        expected = self._expectations.output_tokens(pulled.model)
        band = self._settings.slo_band if pulled.priority is None else pulled.priority
        return Run(
            run_id=pulled.run_id,
            queue_id=pulled.queue_id,
            model=pulled.model,
            prompt_tokens=pulled.prompt_tokens,
            output_tokens_max=pulled.output_tokens_max,
            resumed=pulled.stored,
            produced=pulled.stored,
            stored=pulled.stored,
            kv_reserved=pulled.prompt_tokens + min(pulled.output_tokens_max, max(expected, pulled.stored + 1)),
            urgency=Urgency(band, pulled.deadline_s),
            first_token=pulled.first_token,
            slo_class=pulled.slo_class,
            resumable=pulled.resumable,
            displacements=pulled.displacements,
            failed=pulled.failed,
        )
