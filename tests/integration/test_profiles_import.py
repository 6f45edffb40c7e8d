"""Profiles over a real queue: exported, imported and refused over gRPC, by the commands too; and learned rows outlive the estimator's
death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
import yaml
from click.testing import CliRunner, Result

from qlm.api.v1 import estimator_pb2, estimator_pb2_grpc
from qlm.wire_errors import from_rpc_error
from qlm_cli.root import root
from qlm_core.profiles.calibration import CalibratedTime, CalibrationProfile, CalibrationTable
from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot, WorkloadProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.length_model import LengthModel, LengthScore
from qlm_core.vocabulary.errors import InvalidRequest, PreconditionFailed
from qlm_process.profile_file import dump_profiles, parse_profiles
from qlm_process.wire import profile as profile_wire
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import ESTIMATOR_ROLE

from .estimator_rig import PATIENCE_S, Estimator, Rig, learned, until

A100 = next(row for row in shipped_snapshot().hardware if (row.gpu, row.model) == ("A100-80GB", "Mistral-7B"))
LEARNED = replace(A100, instance="a100-0", slowdown=1.25, samples=40, prior_share=0.25)
MEASURED = replace(A100, gpu="L4", kv_capacity_tokens=20_000, origin="measured")
BROUGHT = ProfileSnapshot(version=0, made_s=0.0, hardware=(LEARNED, MEASURED))


@pytest.fixture
async def rig(server: EmbeddedServer) -> AsyncIterator[Rig]:
    rig = Rig(RedisQueue(server.url))
    await rig.start()
    yield rig
    await rig.queue.stop()


async def leading(rig: Rig, url: str, lease_ttl_s: float = 1.0) -> Estimator:
    estimator = Estimator(url, lease_ttl_s)
    await estimator.start()

    async def leads() -> bool:
        """It has the lease, and its term has begun."""
        if await rig.queue.leader_address(ESTIMATOR_ROLE) != estimator.address:
            return False
        async with estimator.stub() as stub:
            try:
                await stub.GetOutcomes(estimator_pb2.GetOutcomesRequest(), timeout=PATIENCE_S)
            except grpc.aio.AioRpcError:
                return False
        return True

    await until(leads, "leadership")
    return estimator


@pytest.fixture
async def leader(rig: Rig, server: EmbeddedServer) -> AsyncIterator[Estimator]:
    estimator = await leading(rig, server.url, lease_ttl_s=10.0)  # a busy machine shall not end the term
    yield estimator
    await estimator.stop()


async def bring(estimator: Estimator, snapshot: ProfileSnapshot | estimator_pb2.ProfileSnapshot) -> estimator_pb2.ImportProfilesResponse:
    message = snapshot if isinstance(snapshot, estimator_pb2.ProfileSnapshot) else profile_wire.to_proto(snapshot)
    async with estimator.stub() as stub:
        try:
            return await stub.ImportProfiles(estimator_pb2.ImportProfilesRequest(profiles=message), timeout=PATIENCE_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


async def rows(estimator: Estimator) -> dict[tuple[str, str, str], HardwareProfile]:
    snapshot = profile_wire.from_proto(await estimator.profiles())
    return {(row.instance, row.gpu, row.model): row for row in snapshot.hardware}


async def qlm(*arguments: str, text: str | None = None) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, root, list(arguments), input=text)


async def test_an_import_is_published_and_survives_a_restart(rig: Rig, server: EmbeddedServer) -> None:
    estimator = await leading(rig, server.url)
    before = (await estimator.profiles()).version
    answer = await bring(estimator, BROUGHT)
    assert (answer.version, answer.hardware, answer.workload) == (before + 1, 2, 0)
    assert (await rig.queue.read_profiles())[0] == answer.version
    await estimator.kill()
    again = await leading(rig, server.url)
    found = await rows(again)
    assert found["", "L4", "Mistral-7B"] == MEASURED
    assert found["a100-0", "A100-80GB", "Mistral-7B"].slowdown == pytest.approx(1.25)
    assert len((await again.profiles()).hardware) == 10 + 2
    await again.stop()


async def test_calibration_and_the_length_model_are_brought_as_well(rig: Rig, server: EmbeddedServer) -> None:
    estimator = await leading(rig, server.url)
    calibrated = CalibrationProfile(time=CalibratedTime.WAIT, model="chat", bias_factor=1.25, evidence_s=900.0, samples=12.5)
    scores = (LengthScore(model="chat", used=True, samples=90, median_error_tokens=50.0, model_error_tokens=40.0),)
    lengths = LengthModel(features=(1, 9), weights=(0.5, -0.25), curvatures=(1.0, 2.0), scores=scores)
    exported = dump_profiles(replace(BROUGHT, calibration=CalibrationTable((calibrated,)), length_model=lengths))
    await bring(estimator, parse_profiles(exported))
    await estimator.kill()
    again = await leading(rig, server.url)
    found = profile_wire.from_proto(await again.profiles())
    (row,) = (row for row in found.calibration.rows if row.key == calibrated.key)
    assert (row.bias_factor, row.samples) == pytest.approx((1.25, 12.5))
    assert found.length_model == lengths
    await again.stop()


async def test_other_rows_stay(rig: Rig, leader: Estimator) -> None:
    await rig.serve(20, 100)
    await learned(leader, 20)
    await bring(leader, BROUGHT)
    assert await learned(leader, 20)
    await bring(leader, replace(BROUGHT, hardware=(replace(MEASURED, gpu="L40S"),)))
    assert {("", "L4", "Mistral-7B"), ("", "L40S", "Mistral-7B"), ("a100-0", "A100-80GB", "Mistral-7B")} <= set(await rows(leader))


def _message(change: Callable[[estimator_pb2.ProfileSnapshot], object]) -> estimator_pb2.ProfileSnapshot:
    message = profile_wire.to_proto(BROUGHT)
    change(message)
    return message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda message: setattr(message.hardware[0], "decode_a_ms", float("nan")), "decode_a_ms is finite"),
        (lambda message: setattr(message.hardware[0], "slowdown", -1.0), "slowdown and decode_a_ms are > 0"),
        (lambda message: setattr(message.hardware[0], "slowdown", 99.0), "slowdown is from 1/16 to 16"),
        (lambda message: setattr(message.hardware[1], "origin", "hearsay"), "origin is one of"),
        (lambda message: setattr(message.hardware[1], "kv_capacity_tokens", 1 << 40), "contradicts 1 x 24.2 GB of memory"),
        (lambda message: message.hardware.append(message.hardware[0]), "given twice"),
        (lambda message: message.length_model.features.extend(range(5_000)), "a length model of at most 4096 features"),
        (lambda message: message.ClearField("hardware"), "no rows to import"),
    ],
)
async def test_damaged_rows_change_nothing(leader: Estimator, change: Callable[[estimator_pb2.ProfileSnapshot], object], said: str) -> None:
    before = (await leader.profiles()).version
    with pytest.raises(InvalidRequest, match=said) as caught:
        await bring(leader, _message(change))
    assert (caught.value.reason, caught.value.details["field"]) == ("INVALID_FIELD", "profiles")
    assert (await leader.profiles()).version == before


async def test_a_standby_refuses_and_names_the_leader(server: EmbeddedServer, leader: Estimator) -> None:
    standby = Estimator(server.url)
    await standby.start()
    try:
        with pytest.raises(PreconditionFailed) as caught:
            await bring(standby, BROUGHT)
        assert (caught.value.reason, caught.value.details["leader"]) == ("NOT_LEADER", leader.address)
    finally:
        await standby.stop()


async def test_the_commands_export_and_import_a_file(server: EmbeddedServer, leader: Estimator, tmp_path: Path) -> None:
    """Sent to a standby, which names the leader."""
    standby = Estimator(server.url)
    await standby.start()
    where = ("profiles", "--estimator", standby.address)
    file = str(tmp_path / "profiles.yaml")
    try:
        nothing = await qlm(*where, "export", file)
        assert (nothing.exit_code, Path(file).exists()) == (1, False)
        assert "nothing was exported" in nothing.output
        done = await qlm(*where, "import", "-", text=dump_profiles(BROUGHT))
        assert done.exit_code == 0, done.output
        # The estimators log to the same standard output here.
        assert f"2 hardware and 0 workload rows are in version {(await leader.profiles()).version}\n" in done.output
        exported = await qlm(*where, "export", file)
        assert exported.exit_code == 0, exported.output
        assert {row["gpu"] for row in yaml.safe_load(Path(file).read_text("utf-8"))["hardware"]} == {"A100-80GB", "L4"}
        assert (await qlm(*where, "import", file)).exit_code == 0
        shown = await qlm(*where)
        assert (shown.exit_code, "a100-0" in shown.output, "25%" in shown.output, "measured" in shown.output) == (0, True, True, True)
        document = json.loads((await qlm(*where, "--json")).output.splitlines()[-1])
        assert [row["slowdown"] for row in document["hardware"] if row["instance"]] == [pytest.approx(1.25)]
    finally:
        await standby.stop()


async def test_the_command_shows_mean_and_quantiles_of_a_class(leader: Estimator) -> None:
    """Most outputs are of 9 tokens, a third of 13, the others longer."""
    row = WorkloadProfile(
        model="chat",
        prompt_tokens_mean=500.0,
        prompt_tokens_variance=1.0,
        output_tokens_mean=11.5,
        output_tokens_variance=4.0,
        samples=1_000,
        output_first_bin=8,
        output_shares=(0.6, 0.0, 0.0, 0.0, 0.34, 0.0, 0.0, 0.06),
    )
    await bring(leader, replace(BROUGHT, workload=(row,)))
    document = json.loads((await qlm("profiles", "--estimator", leader.address, "--json")).output.splitlines()[-1])
    (shown,) = document["workload"]
    assert (shown["output_tokens_p50"], shown["output_tokens_p90"]) == (9.0, 13.0)
    assert (shown["output_tokens_mean"], shown["samples"]) == (11.5, 1_000)


async def test_the_import_command_names_the_fault_of_a_file(leader: Estimator, tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    for text, said in (
        (dump_profiles(BROUGHT).replace("slowdown", "slowdwon"), "hardware row 1.slowdwon"),
        ("\x00", "not YAML"),
        ("qlm_profiles: 3", "qlm_profiles is 3, not 1"),
    ):
        file.write_text(text, "utf-8")
        result = await qlm("profiles", "--estimator", leader.address, "import", str(file))
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())
    file.write_bytes(b"\xff\xfe\xfa")
    assert (await qlm("profiles", "--estimator", leader.address, "import", str(file))).exit_code == 2
    assert (await qlm("profiles", "--estimator", leader.address, "import", str(tmp_path / "nobody"))).exit_code == 2
    away = await qlm("profiles", "--estimator", "127.0.0.1:1", "export")
    assert (away.exit_code, "Traceback" in away.output) == (1, False)


# The real processes ---------------------------------------------------------------------------------------------------


async def start_estimator(folder: Path, name: str, url: str) -> tuple[asyncio.subprocess.Process, str]:
    """A process, and its address."""
    config = folder / "qlm.yaml"
    settings = {"publish_every_s": 0.1, "overview_every_s": 0.1, "read_block_s": 0.05, "read_gap_s": 0.01}
    document = {
        "models": [{"name": "chat", "profile": "Mistral-7B"}],
        "queue": {"url": url, "lease_ttl_s": 1.0, "lease_renew_s": 0.2},
        "estimator": settings,
        "telemetry": {"log_format": "json"},
    }
    config.write_text(yaml.safe_dump(document), "utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "qlm_estimator",
        "--config",
        str(config),
        "--name",
        name,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={key: value for key, value in os.environ.items() if not key.startswith("QLM_")},
    )
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        while line := await process.stderr.readline():
            if line.startswith(b"{") and json.loads(line)["event"] == "ready":
                return process, str(json.loads(line)["address"])
    raise AssertionError("the estimator did not become ready")


async def profiles_of(address: str) -> ProfileSnapshot:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: estimator_pb2_grpc.EstimatorAsyncStub = estimator_pb2_grpc.EstimatorStub(channel)
        return profile_wire.from_proto(await stub.GetProfiles(estimator_pb2.GetProfilesRequest(), timeout=PATIENCE_S))


async def test_a_killed_estimator_is_followed_by_one_that_continues_with_its_profiles(
    rig: Rig, server: EmbeddedServer, tmp_path: Path
) -> None:
    first, address = await start_estimator(tmp_path, "first", server.url)
    second: asyncio.subprocess.Process | None = None
    try:

        async def leads() -> bool:
            return await rig.queue.leader_address(ESTIMATOR_ROLE) == address

        await until(leads, "leadership")
        done = await qlm("profiles", "--estimator", address, "import", "-", text=dump_profiles(replace(BROUGHT, hardware=(MEASURED,))))
        assert done.exit_code == 0, done.output
        before = await learned_rows(rig, address, 10)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        second, address = await start_estimator(tmp_path, "second", server.url)
        await until(leads, "the second leads")
        at_once = await profiles_of(address)
        assert [row for row in at_once.hardware if row.instance] == [before]
        assert MEASURED in at_once.hardware
        after = await learned_rows(rig, address, before.samples + 5)
        assert after.prior_share < before.prior_share
        assert after.slowdown == pytest.approx(before.slowdown, rel=0.5)
        assert MEASURED in (await profiles_of(address)).hardware
    finally:
        for process in (first, second):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()


async def learned_rows(rig: Rig, address: str, samples: int) -> HardwareProfile:
    """Serves until so many runs are behind the instance's row, and as many requests behind the workload."""
    found: list[HardwareProfile] = []

    async def enough() -> bool:
        await rig.serve(5, 300, seconds=0.02)
        snapshot = await profiles_of(address)
        found[:] = [row for row in snapshot.hardware if row.instance]
        return bool(found and found[0].samples >= samples)

    await until(enough, f"{samples} runs are learned")
    version = -1

    async def settled() -> bool:
        nonlocal version
        snapshot = await profiles_of(address)
        found[:] = [row for row in snapshot.hardware if row.instance]
        unchanged, version = snapshot.version == version, snapshot.version
        await asyncio.sleep(0.3)
        return unchanged

    await until(settled, "all is published")
    return found[0]
