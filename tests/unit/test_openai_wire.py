"""The openai engine's pieces without a server: events, stop strings, request bodies, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qlm_agent.delivery.logprobs import record
from qlm_agent.delivery.stop_strings import Piece, StopMatch, StopStrings
from qlm_agent.engines.openai.errors import NotServable, ServerRefused
from qlm_agent.engines.openai.event_stream import EVENT_BYTES_MAX, EventStream
from qlm_agent.engines.openai.logprobs import records_of
from qlm_agent.engines.openai.request_body import completion_body
from qlm_agent.engines.openai.run import RemoteModel, Run
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.openai.server_load import ServerLoad, read_load
from qlm_agent.engines.openai.settings import EXTRA_PARAMETERS
from qlm_agent.engines.port import EngineRequest, FailureKind, Sampling, TokenPrompt

STREAM = (
    b': a comment\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "\xc3\xa9"}\n\n\nid: 7\n\ndata: {"c":\ndata:  2}\n: more\n\n'
    b'data: {"d": 3}\r\rdata: [DONE]\n\n'
)
EVENTS = [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b'{"c":\n 2}', b'{"d": 3}', b"[DONE]"]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
@pytest.mark.parametrize("ends", [b"", b"\n", b"\r", b"\r\n"], ids=["mixed", "LF", "CR", "CRLF"])
@given(st.lists(st.integers(0, 2 * len(STREAM)), max_size=8))
@example(list(range(2 * len(STREAM))))
def test_events_are_the_same_however_the_bytes_come(bom: bytes, ends: bytes, cuts: list[int]) -> None:
    sent = bom + (STREAM if not ends else b"".join(line + ends for line in STREAM.splitlines()))
    stream = EventStream()
    places = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    found = [event for start, end in pairwise(places) for event in stream.feed(sent[start:end])]
    assert found + stream.end() == EVENTS
    assert stream.beside == ""


def test_a_stream_may_end_without_an_empty_line_but_not_within_a_line() -> None:
    stream = EventStream()
    assert stream.feed(b"data: [DONE]\n") == []
    assert (stream.end(), stream.end()) == ([b"[DONE]"], [])
    broken = EventStream()
    assert broken.feed(b'data: {"a"') + broken.end() == []


def test_an_event_without_end_is_refused() -> None:
    for line in (b"x" * 1000, b"data: " + b"x" * 1000 + b"\n"):
        stream = EventStream()
        stream.feed(line * (EVENT_BYTES_MAX // 1000 - 100))
        with pytest.raises(ValueError, match="more than"):
            stream.feed(line * 200)


def _cut(text: str, stop: list[str]) -> str:
    """Before the stop string that is whole first, and of those the longest."""
    for end in range(len(text) + 1):
        if ended := [each for each in stop if text[:end].endswith(each)]:
            return text[: end - max(map(len, ended))]
    return text


texts = st.text(alphabet="ab\n", max_size=30)
stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@given(texts, stops, st.lists(st.integers(0, 30), max_size=10), st.integers(0, 10))
@example(text="a\na", stop=["\n", "a\na"], cuts=[2], seam=1)
@example(text="a\na", stop=["\n", "a\na"], cuts=[], seam=1)
def test_output_ends_before_a_stop_string_over_any_chunks_and_seams(text: str, stop: list[str], cuts: list[int], seam: int) -> None:
    """`seam`: after so many chunks the run is interrupted, and goes on from its delivered text."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:end] for start, end in pairwise(places)]
    first = StopStrings(stop)
    delivered = ""
    for number, chunk in enumerate(chunks):
        if number == seam:
            break
        made, found = first.feed(Piece(chunk))
        delivered += "".join(each.text for each in made)
        if found is not None:
            assert delivered + found.last.text[: found.at] == _cut(text, stop)
            return
    assert text.startswith(delivered)
    second = StopStrings(stop)
    rest = text[len(delivered) :]
    made, found = second.feed(Piece(rest))
    delivered += "".join(each.text for each in made)
    delivered += found.last.text[: found.at] if found is not None else "".join(each.text for each in second.flush())
    assert delivered == _cut(text, stop)


def test_token_ids_go_with_their_text() -> None:
    stops = StopStrings(["STOP"])
    assert stops.feed(Piece("abc S", (1, 2))) == ([], None)
    assert stops.feed(Piece("", (3,))) == ([], None)
    assert stops.feed(Piece("o", (4,))) == ([Piece("abc S", (1, 2)), Piece("", (3,)), Piece("o", (4,))], None)
    assert stops.feed(Piece("x ST", (5, 6))) == ([], None)
    delivered, found = stops.feed(Piece("OP y", (7,)))
    assert delivered == []
    assert found is not None
    assert (found.last, found.at) == (Piece("x STOP y", (5, 6, 7)), 2)


class Decoder:
    """A server that decodes these words; `strips`: it leaves out the space before a first word, as Llama 2's tokenizer does."""

    def __init__(self, words: Sequence[str], *, strips: bool) -> None:
        self._words = words
        self._strips = strips

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        text = "".join(self._words[token] for token in token_ids)
        return text.removeprefix(" ") if self._strips else text


@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize(
    ("words", "stop", "delivered"),
    [
        ([" #", "##", " more"], "###", 0),
        ([" a", "#", "##"], "###", 1),
        ([" a", " b", "# #"], "# #", 2),
        (["a", " #", "##"], "###", 1),
        ([" ", "#", "##"], "###", 1),
    ],
)
async def test_no_token_in_which_a_stop_string_begins_is_delivered(words: list[str], stop: str, delivered: int, strips: bool) -> None:
    model = RemoteModel(
        name="m",
        remote="m",
        server=cast(OpenAiServer, Decoder(words, strips=strips)),
        context_tokens=100,
        text_output=False,
        continues_chats=False,
        parameters=(),
        ends=set(),
    )
    request = EngineRequest(run_id="r", model="m", prompt=TokenPrompt(ids=[1]), prompt_tokens=1, output_tokens_max=9)
    run = Run(request, model, lambda output, urgent: None, asyncio.Event(), lambda: asyncio.sleep(0.0, True), lambda: 0.0)
    ids, text = tuple(range(len(words))), "".join(words)
    made = await run._until(StopMatch(Piece(text, ids), text.index(stop)))
    assert made.token_ids == ids[:delivered]


def test_everything_requested_is_in_the_body() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        stop=("x",),
        seed=3,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        ignore_eos=True,
        logprobs=2,
        json_schema='{"type": "object"}',
    )
    body = completion_body("far", [1, 2], sampling, EXTRA_PARAMETERS)
    assert body == {
        "model": "far",
        "prompt": [1, 2],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "structured_outputs": {"json": {"type": "object"}},
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    assert completion_body("far", "text", Sampling(regex="a+"), EXTRA_PARAMETERS)["structured_outputs"] == {"regex": "a+"}
    plain = {"model": "far", "prompt": "text", "stream": True, "stream_options": {"include_usage": True}}
    assert completion_body("far", "text", Sampling(), ()) == plain


def test_what_is_off_is_not_left_to_the_defaults_of_the_model() -> None:
    """vLLM has defaults from the model's generation_config.json. Other servers have other words for "off"."""
    assert {"top_k": 0, "min_p": 0.0}.items() <= completion_body("far", [1, 2], Sampling(), EXTRA_PARAMETERS).items()
    assert not {"top_k", "min_p"} & completion_body("far", [1, 2], Sampling(), ()).keys()
    assert not {"top_k", "min_p"} & completion_body("far", "text", Sampling(), EXTRA_PARAMETERS).keys()


def test_logprobs_of_a_chunk() -> None:
    said = {
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -1.0}, {"token_id:2": -3.0, "token_id:5": -0.25}],
    }
    assert records_of(said, (7, 2), 1) == record(-0.5, [(7, -0.5)]) + record(-3.0, [(5, -0.25)])
    assert records_of({"token_logprobs": [-0.5]}, (7,), 0) == record(-0.5, [])


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        {"token_logprobs": [-0.5, -1.0]},
        {"token_logprobs": [None], "top_logprobs": [{"token_id:7": -0.5}]},
        {"token_logprobs": [-0.5], "top_logprobs": [{}]},
        {"token_logprobs": [-0.5], "top_logprobs": [None]},
        {"token_logprobs": [-0.5], "top_logprobs": [{"the": -0.5}]},
        {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:x": -0.5}]},
        {"token_logprobs": [-0.5], "top_logprobs": ["the"]},
    ],
)
def test_logprobs_other_than_the_requested_ones_are_refused(said: object) -> None:
    with pytest.raises(ValueError, match=r".*"):
        records_of(said, (7,), 1)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(top_k=3), "top_k"),
        (Sampling(min_p=0.5), "min_p"),
        (Sampling(regex="a"), "structured_outputs"),
        (Sampling(logprobs=0), "logprobs"),
        (Sampling(ignore_eos=True), "eos"),
    ],
)
def test_what_the_server_does_not_know_is_refused_by_name(sampling: Sampling, named: str) -> None:
    with pytest.raises(NotServable, match=named):
        completion_body("far", "text", sampling, ())
    with pytest.raises(NotServable, match="not JSON"):
        completion_body("far", "text", Sampling(json_schema="{"), EXTRA_PARAMETERS)


def test_load_is_read_from_the_metrics_of_vllm() -> None:
    metrics = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 3.0
vllm:num_requests_running{engine="1",model_name="a"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a"} 4.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 6.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="None"} 1.0
"""
    assert read_load(metrics) == ServerLoad(running=5, waiting=4, kv_usage=0.375, kv_capacity_tokens=3200, preemptions=6, block_tokens=32)
    assert read_load("# TYPE http_requests counter\nhttp_requests_total 3\n") is None
    with pytest.raises(ValueError):  # noqa: PT011
        read_load("<html>no metrics</html>")


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
@pytest.mark.parametrize("name", ["vllm:num_requests_running", "vllm:num_preemptions_total", "vllm:kv_cache_usage_perc"])
def test_a_load_that_is_no_number_is_none(name: str, value: str) -> None:
    with pytest.raises(ValueError, match="no number"):
        read_load(f"vllm:kv_cache_usage_perc 0.5\n{name} {value}\n")


def test_statuses_say_whether_another_attempt_may_succeed() -> None:
    statuses = (400, 401, 404, 413, 422, 429, 500, 503)
    refused = {status for status in statuses if ServerRefused("no", status).kind is FailureKind.REFUSED}
    assert refused == {400, 413, 422}
    assert {status for status in statuses if ServerRefused("no", status).passing} == {429, 503}
