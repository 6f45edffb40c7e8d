"""Metrics of an agent, and the spans of its requests. Times are seconds of the queue's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opentelemetry.trace import TracerProvider
from opentelemetry.util.types import AttributeValue
from prometheus_client import Counter, Gauge

from qlm.api.v1 import instance_pb2
from qlm.internal.v1 import events_pb2
from qlm_agent.decisions.effects import CompleteItem
from qlm_agent.delivery.held_run import HeldRun
from qlm_agent.engines.port import EngineStats
from qlm_agent.telemetry.operations import LsoMetrics, LsoRecords, RunSpans
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_process import gen_ai
from qlm_process.metrics import Metrics


class AgentMetrics(Metrics):
    """Counters and gauges of an agent."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self.running = Gauge("qlm_agent_running_requests", "Requests on the GPU.", registry=registry)
        self.waiting = Gauge("qlm_agent_engine_waiting_requests", "Requests in the engine that do not run yet.", registry=registry)
        self.offloaded = Gauge("qlm_agent_offloaded_requests", "Requests whose KV is in host memory.", registry=registry)
        self.kv_used = Gauge("qlm_agent_kv_used_tokens", "KV in use, in tokens.", registry=registry)
        self.kv_capacity = Gauge("qlm_agent_kv_capacity_tokens", "KV of the active model, in tokens.", registry=registry)
        self.host_kv_used = Gauge("qlm_agent_host_kv_used_tokens", "KV in host memory, in tokens of the active model.", registry=registry)
        self.host_kv_capacity = Gauge(
            "qlm_agent_host_kv_capacity_tokens", "KV that host memory takes, in tokens of the active model.", registry=registry
        )
        self.host_memory_used = Gauge(
            "qlm_agent_host_memory_used_bytes", "Host memory taken by weights of warm models and offloaded KV.", registry=registry
        )
        self.host_memory = Gauge("qlm_agent_host_memory_bytes", "Limit of that host memory.", registry=registry)
        self.held = Gauge("qlm_agent_held_tokens", "Output tokens that the server has not confirmed yet.", registry=registry)
        self.lso = LsoMetrics(registry)
        self.emitted = Counter("qlm_agent_emitted_tokens_total", "Output tokens stored and sent.", registry=registry)
        self.ended = Counter("qlm_agent_ended_requests_total", "Requests ended by this agent, by state.", ["state"], registry=registry)
        self.returned = Counter("qlm_agent_returned_requests_total", "Requests given back, by cause.", ["cause"], registry=registry)
        self.dropped = Counter("qlm_agent_dropped_requests_total", "Requests dropped: ended elsewhere, or another's.", registry=registry)
        self.swaps = Counter("qlm_agent_model_swaps_total", "Models made active, by model.", ["model"], registry=registry)
        self.failed_loads = Counter("qlm_agent_failed_model_loads_total", "Models that could not be loaded.", ["model"], registry=registry)
        self.lease_losses = Counter("qlm_agent_lease_losses_total", "Leases lost.", registry=registry)
        self.lost_calls = Counter(
            "qlm_agent_lost_calls_total", "Calls without an answer of the server, by call.", ["call"], registry=registry
        )
        self.dropped_events = Counter(
            "qlm_agent_dropped_events_total", "Events of operations that could not be sent to the queue.", registry=registry
        )
        self.preemptions = Gauge("qlm_agent_preemptions", "Runs that the engine preempted since its start.", registry=registry)
        self.gen_ai = gen_ai.ServerHistograms(registry)


class AgentTelemetry:
    """Records the runs' events, as metrics and as spans of the request's own trace (names as in the docs). `lso`: the same for the
    operations of the agent."""

    def __init__(
        self,
        instance: str,
        metrics: AgentMetrics,
        provider: TracerProvider,
        report: Callable[[events_pb2.RequestEvent], None] = lambda event: None,
    ) -> None:
        """`report`: takes the events of operations."""
        self.metrics = metrics
        tracer = provider.get_tracer("qlm_agent")
        self._spans = RunSpans(instance, tracer)
        self.lso = LsoRecords(instance, metrics.lso, tracer, self._spans, report)

    def record_pull(self, runs: Sequence[HeldRun], began_s: float, ended_s: float) -> None:
        """A pull from `began_s` to `ended_s` returned these runs. A wait for the last model swap is linked to that."""
        for held in runs:
            links = self.lso.model_swap_links(held)
            self._spans.record("qlm.queue_wait", held, held.pulled.accepted_s, held.pulled_s, links=links)
        self.lso.record_pull(runs, began_s, ended_s)

    def record_engine_exit(self, held: HeldRun) -> None:
        """The run left the engine, for any reason."""
        if held.started_s and held.first_token_s:
            self._spans.record("qlm.prefill", held, held.started_s, held.first_token_s)
            self._spans.record("qlm.decode", held, held.first_token_s, held.last_token_s, {"qlm.output_tokens": len(held.output)})
        elif held.started_s and held.last_token_s:
            # Resumed: an earlier attempt made the first token.
            self._spans.record("qlm.decode", held, held.started_s, held.last_token_s, {"qlm.output_tokens": len(held.output)})

    def record_completion(self, held: HeldRun, item: CompleteItem, began_s: float, ended_s: float) -> None:
        """The call that wrote the end of the run: the span that has what the conventions say of an answer, and its histograms."""
        chat = held.request is not None and isinstance(held.request.prompt, ChatPrompt)
        request = {
            gen_ai.OPERATION_NAME: gen_ai.CHAT if chat else gen_ai.COMPLETION,
            gen_ai.PROVIDER_NAME: gen_ai.PROVIDER,
            gen_ai.REQUEST_MODEL: held.model,
        }
        finish = item.ending.finish
        if finish is None:
            request[gen_ai.ERROR_TYPE] = item.ending.reason
        answer: dict[str, AttributeValue] = {
            gen_ai.RESPONSE_ID: held.pulled.key.request_id,
            gen_ai.RESPONSE_MODEL: held.model,
            gen_ai.INPUT_TOKENS: held.prompt_tokens,
            gen_ai.OUTPUT_TOKENS: item.end,
        }
        if finish is not None:
            answer[gen_ai.FINISH_REASONS] = (finish.value,)
        self._spans.record("qlm.complete", held, began_s, ended_s, {**request, **answer})
        histograms = self.metrics.gen_ai
        histograms.record(gen_ai.REQUEST_DURATION, ended_s - held.pulled.accepted_s, request)
        if finish is not None and held.first_token_s:
            histograms.record(gen_ai.TIME_TO_FIRST_TOKEN, held.first_token_s - held.pulled.accepted_s, request)
            if item.end > 1:
                histograms.record(gen_ai.TIME_PER_OUTPUT_TOKEN, (held.last_token_s - held.first_token_s) / (item.end - 1), request)

    def load(self, load: instance_pb2.InstanceLoad, stats: EngineStats, held_tokens: int) -> None:
        """The agent now."""
        metrics = self.metrics
        metrics.running.set(load.running)
        metrics.waiting.set(stats.waiting)
        metrics.offloaded.set(load.offloaded)
        metrics.kv_used.set(load.kv_used_tokens)
        metrics.kv_capacity.set(load.kv_capacity_tokens)
        metrics.host_kv_used.set(stats.host_kv_used_tokens)
        metrics.host_kv_capacity.set(stats.host_kv_capacity_tokens)
        metrics.host_memory_used.set(load.host_memory_used_bytes)
        metrics.host_memory.set(load.host_memory_bytes)
        metrics.held.set(held_tokens)
        metrics.preemptions.set(stats.preemptions)
