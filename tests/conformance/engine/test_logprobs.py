"""Log probabilities: one entry a token, in order, the same with and without interruptions; none where none are requested."""

from __future__ import annotations

import pytest

from qlm.api.v1.request_pb2 import Logprobs, Result
from qlm_agent.delivery.logprobs import record_bytes
from qlm_agent.engines.port import EngineRequest, FailureKind, Sampling

from .subjects import Can, Collected, Reader, Subject, needs, request

ANSWER = 40
TOLERANCE = 1e-4
"""For float32 on a CPU, where a step's kernels depend on what else is in the batch."""


def with_logprobs(subject: Subject, run_id: str, top: int, *, after: list[int | str] | None = None) -> EngineRequest:
    sampling = Sampling(temperature=0.0, ignore_eos=True, logprobs=top)
    return request(subject, run_id, answer=ANSWER, after=after or (), output_tokens_max=ANSWER, sampling=sampling)


def reported(run: Collected, top: int) -> Logprobs:
    """Log probabilities of a run, in order; checks that it is one record a token."""
    assert len(run.logprobs) == record_bytes(top) * len(run.output)
    return Result.FromString(run.logprobs).logprobs


async def whole(subject: Subject, reader: Reader, top: int) -> tuple[Collected, Logprobs]:
    """A run that nothing happens to, and its log probabilities."""
    if subject.engine.text_output:
        pytest.skip("it reports only text")
    await subject.engine.add(with_logprobs(subject, f"whole-{top}", top))
    (run,) = await reader.ends(f"whole-{top}")
    assert len(run.output) == ANSWER
    return run, reported(run, top)


@pytest.mark.parametrize("top", [0, 1, 5, 20])
async def test_each_token_has_its_own_and_the_likeliest(subject: Subject, reader: Reader, top: int) -> None:
    run, said = await whole(subject, reader, top)
    assert len(said.of_token) == ANSWER
    assert all(value <= 0.0 for value in said.of_token)
    assert len(said.top_token_ids) == len(said.of_top) == ANSWER * top
    for place in range(ANSWER if top else 0):
        likeliest = list(said.of_top)[place * top : (place + 1) * top]
        ids = list(said.top_token_ids)[place * top : (place + 1) * top]
        assert likeliest == sorted(likeliest, reverse=True)
        assert len(set(ids)) == top
        assert run.output[place] in [token for token, value in zip(ids, likeliest, strict=True) if value == likeliest[0]]  # greedy
        assert said.of_token[place] == likeliest[0]


async def test_a_token_that_was_drawn_has_its_own(subject: Subject, reader: Reader) -> None:
    if subject.engine.text_output:
        pytest.skip("it reports only text")
    sampling = Sampling(temperature=1.0, ignore_eos=True, logprobs=5)
    await subject.engine.add(request(subject, "drawn", answer=ANSWER, output_tokens_max=ANSWER, sampling=sampling))
    (run,) = await reader.ends("drawn")
    said = reported(run, 5)
    for place, token in enumerate(run.output):
        likeliest = dict(zip(said.top_token_ids[5 * place : 5 * place + 5], said.of_top[5 * place : 5 * place + 5], strict=True))
        if token in likeliest:
            assert said.of_token[place] == likeliest[int(token)]
        else:
            assert said.of_token[place] <= min(likeliest.values())


async def test_all_outputs_have_those_of_their_own_tokens(subject: Subject, reader: Reader) -> None:
    run, _ = await whole(subject, reader, 2)
    for output in run.outputs:
        assert len(output.logprobs) == record_bytes(2) * (len(output.token_ids) // 4)


async def test_a_run_that_requests_none_has_none(subject: Subject, reader: Reader) -> None:
    await subject.engine.add(request(subject, "plain"))
    (plain,) = await reader.ends("plain")
    assert plain.output
    assert plain.logprobs == b""


async def test_they_are_the_same_over_evictions(subject: Subject, reader: Reader) -> None:
    undisturbed, expected = await whole(subject, reader, 5)
    output: list[int | str] = []
    records = b""
    for attempt, made in enumerate((1, 7, 13, ANSWER)):
        run_id = f"part-{attempt}"
        await subject.engine.add(with_logprobs(subject, run_id, 5, after=output))
        await reader.until_made(max(1, made - len(output)), run_id)
        await subject.engine.abort([run_id])
        part = reader.runs[run_id]
        output = output + part.output
        records += part.logprobs
        if len(output) == ANSWER:
            break
    assert output == undisturbed.output
    assert_close(Result.FromString(records).logprobs, expected)


@needs(Can.OFFLOAD)
async def test_they_are_the_same_over_a_kv_swap(subject: Subject, reader: Reader) -> None:
    undisturbed, expected = await whole(subject, reader, 5)
    await subject.engine.add(with_logprobs(subject, "moved", 5))
    await reader.until_made(5, "moved")
    if list(await subject.engine.offload(["moved"])) == ["moved"]:
        assert list(await subject.engine.restore(["moved"])) == ["moved"]
    (moved,) = await reader.ends("moved")
    assert moved.output == undisturbed.output
    assert_close(reported(moved, 5), expected)


async def test_an_engine_that_reports_only_text_refuses(subject: Subject, reader: Reader) -> None:
    if not subject.engine.text_output:
        pytest.skip("it reports token ids")
    await subject.engine.add(with_logprobs(subject, "refused", 5))
    (refused,) = await reader.ends("refused")
    assert refused.outputs[-1].failure is not None
    assert refused.outputs[-1].failure.kind is FailureKind.REFUSED
    assert "logprobs" in refused.outputs[-1].failure.message


def assert_close(said: Logprobs, expected: Logprobs) -> None:
    """Equal within `TOLERANCE`. For likeliest tokens only the values: those of tokens that are equally likely may change places."""
    assert len(said.of_token) == len(expected.of_token)
    assert list(said.of_token) == pytest.approx(list(expected.of_token), abs=TOLERANCE)
    assert list(said.of_top) == pytest.approx(list(expected.of_top), abs=TOLERANCE)
