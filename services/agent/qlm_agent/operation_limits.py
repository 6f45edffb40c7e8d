"""What the LSOs beyond the five ask of an agent (`qlm_core.operations`), by what is at its head and what it runs."""

from __future__ import annotations

from collections.abc import Iterator

from qlm_agent.events import QueueHead
from qlm_agent.expectations import Expectations
from qlm_agent.machine_settings import MachineSettings
from qlm_agent.runs import RunTable
from qlm_core.distribution import Normal
from qlm_core.operations.operation import Means, Situation, limits_of, shortest_slo_s
from qlm_core.operations.table import operations_of
from qlm_core.request import SloKind


class OperationLimits:
    """Without operations, the limits are those of the settings."""

    def __init__(self, settings: MachineSettings, runs: RunTable, expectations: Expectations) -> None:
        self._batch_max = settings.batch_max
        self._operations = operations_of(settings.operations)
        self._runs = runs
        self._expectations = expectations

    def batch_max(self, model: str, head: QueueHead | None) -> int:
        """Most requests of a model that may run at once. Costs O(runs) where there are operations."""
        hardware = self._expectations.hardware.get(model)
        if not self._operations or hardware is None:
            return self._batch_max
        means = Means(hardware=hardware, batch_max=self._batch_max)
        return limits_of(self._operations, list(self._situations(model, head)), means).batch_max

    def _situations(self, model: str, head: QueueHead | None) -> Iterator[Situation]:
        """Of the head, and of each class that runs."""
        if head is not None and head.model == model and head.priority is None:
            prompt_tokens = head.waiting_prompt_tokens / max(1, head.waiting)
            yield self._situation(model, head.slo_class, prompt_tokens, first_token=head.first_token)
        classes: dict[tuple[str, bool], list[int]] = {}
        for run in self._runs.on_gpu():
            classes.setdefault((run.slo_class, run.first_token), []).append(run.prompt_tokens)
        for (slo_class, first_token), prompts in classes.items():
            yield self._situation(model, slo_class, sum(prompts) / len(prompts), first_token=first_token)

    def _situation(self, model: str, slo_class: str, prompt_tokens: float, *, first_token: bool) -> Situation:
        return Situation(
            model=model,
            slo_kind=SloKind.FIRST_TOKEN if first_token else SloKind.COMPLETION,
            slo_s=shortest_slo_s(slo_class),
            prompt_tokens=prompt_tokens,
            output=Normal(float(self._expectations.output_tokens(model, slo_class)), 0.0),
        )
