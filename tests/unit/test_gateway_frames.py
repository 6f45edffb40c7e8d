"""Frames from the queue's bytes to a reader's output, by the shell of the gateway's machine."""

from __future__ import annotations

from qlm.api.v1.request_pb2 import RequestState, Result
from qlm.internal.v1.frames_pb2 import Frame, FrameBatch
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.metrics import GatewayMetrics
from qlm_gateway.streams.hub import StreamHub
from qlm_gateway.streams.machine import GatewayMachine
from qlm_gateway.streams.readers import StreamLimits
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import Bounds

KEY = RequestKey("default", "r")


def batch(*frames: Frame) -> bytes:
    return FrameBatch(frames=frames).SerializeToString()


def test_output_and_end_that_precede_the_answer_of_an_accept_are_the_readers() -> None:
    metrics = GatewayMetrics()
    hub = StreamHub(MemoryQueue("q", Bounds(), lambda: 0.0), GatewayMachine("g", StreamLimits()), {}, metrics, lambda: 0.0)
    result = Result(state=RequestState.REQUEST_STATE_COMPLETED, output_token_ids=[7, 8, 9])
    result.usage.output_tokens = 3
    stream, left = hub.expect(), hub.expect()
    hub.on_batch(batch(Frame(queue_id="2-0", token_ids=[1]), Frame(queue_id="1-0", token_ids=[7])))
    hub.on_batch(batch(Frame(queue_id="1-0", offset=1, token_ids=[8, 9], result=result)))
    hub.close(left)
    assert not stream.ready
    hub.accepted(stream, KEY, "1-0", "m")
    offset, tokens, pieces, logprobs = stream.take()
    assert (offset, list(tokens), pieces, logprobs) == (0, [7, 8, 9], [], None)
    assert stream.result is not None
    assert (stream.result.state, list(stream.result.output_token_ids)) == (result.state, [])
    assert metrics.registry.get_sample_value("qlm_gateway_attaches_total", {"kind": "again"}) is None, "the queue received no call"
    hub.close(stream)
