"""`qlm pause` and `qlm resume` on a gateway with a scripted agent: reports to clients and operators."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import CliRunner, Result

import qlm
from qlm.errors import CallDeadlineExceeded, InvalidRequest, NotFound, QueueFull
from qlm_cli.root import root
from qlm_core.vocabulary.pauses import PauseKind
from qlm_queue.operator_values import PAUSES_MAX

from .gateway_rig import MODEL, GatewayRun, Rig


async def run(gateway: GatewayRun, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, root, [*words, "--address", gateway.address])


@pytest.mark.parametrize("whose", [(MODEL,), ("--tenant", "default")])
async def test_paused_requests_are_accepted_and_wait_and_everybody_is_informed(rig: Rig, whose: tuple[str, ...]) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        await client.submit(MODEL, "x", request_id="runs", slo_s=60, max_tokens=3)
        await rig.agent.start_all()
        paused = await run(gateway, "pause", *whose)
        assert (paused.exit_code, paused.output.endswith("is paused\n")) == (0, True), paused.output
        assert "is paused already" in (await run(gateway, "pause", *whose)).output
        shown = await run(gateway, "status")
        assert "paused: model" in shown.output or "paused: tenant default" in shown.output

        accepted = await client.submit(MODEL, "x", request_id="waits", slo_s=60, max_tokens=3)
        assert (accepted.prediction, accepted.paused) == (None, True)
        await rig.agent.start_all()
        assert len(rig.agent.running) == 1, "what runs runs on, and nothing is pulled"
        status = (await client.status("waits")).request
        assert status is not None
        assert (status.prediction, status.paused, status.attempts) == (None, True, 0)
        outlooks: list[qlm.Outlook] = []
        stream = client.stream("waits", outlook_every_s=1.0, on_outlook=outlooks.append, timeout_s=1.6)
        with pytest.raises(CallDeadlineExceeded):
            await anext(stream)
        assert [(outlook.prediction, outlook.paused) for outlook in outlooks] == [(None, True)]
        assert "paused until an operator resumes it" in (await run(gateway, "requests", "show", "waits")).output
        running = (await client.status("runs")).request
        assert running is not None
        assert not running.paused
        again = await client.submit(MODEL, "x", request_id="runs", slo_s=60, max_tokens=3)
        assert (again.duplicate, again.paused) == (True, False)

        assert "goes on" in (await run(gateway, "resume", *whose)).output
        assert "is not paused" in (await run(gateway, "resume", *whose)).output
        rig.serve()
        result = await client.result("runs", 30.0)
        assert result is not None
        assert result.state is qlm.RequestState.COMPLETED
        status = (await client.status("waits")).request
        assert status is not None
        assert not status.paused
        assert (await client.status()).pauses == ()


async def test_wrong_pauses_are_refused(rig: Rig) -> None:
    gateway = await rig.gateway()
    async with qlm.AsyncClient(gateway.address) as client:
        with pytest.raises(NotFound, match="not served"):
            await client.pause(model="typo")
        for wrong in ({}, {"model": ""}, {"tenant": ""}, {"tenant": "\n"}):
            with pytest.raises(InvalidRequest):
                await client.pause(**wrong)
        for number in range(PAUSES_MAX):
            await rig.queue.pause(PauseKind.TENANT, f"t{number}")
        with pytest.raises(QueueFull, match="resume one first"):
            await client.pause(model=MODEL)
        assert len((await client.status()).pauses) == PAUSES_MAX
    for words in (("pause",), ("resume", MODEL, "--tenant", "t")):
        wrong_use = await run(gateway, *words)
        assert (wrong_use.exit_code, "give MODEL or --tenant" in wrong_use.output) == (2, True)
