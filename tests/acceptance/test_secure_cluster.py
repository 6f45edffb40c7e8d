"""`qlm up` with keys and mutual TLS everywhere: commands, services and control, each with the key that it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from click.testing import Result
from google.protobuf.message_factory import GetMessageClass

import qlm
from identity_files import add_key, make_certificates, revoke_key
from qlm.api.v1 import agent_pb2, estimator_pb2, planner_pb2
from qlm.wire_errors import from_rpc_error
from qlm_process.identity.guard import OF_SERVICES
from qlm_process.identity.keys import Role
from running_cluster import RunningCluster, qlm_command, wait_until

pytestmark = pytest.mark.xdist_group("secure")

TIMEOUT_S = 60
READ = {"planner": "/qlm.api.v1.Planner/GetPlan", "estimator": "/qlm.api.v1.Estimator/GetProfiles", "agent": "/qlm.api.v1.Agent/GetStatus"}
FILES = {"planner": planner_pb2, "estimator": estimator_pb2, "agent": agent_pb2}


@dataclass
class Secure:
    cluster: RunningCluster
    tls: dict[str, str]
    keys: dict[Role, str]
    key_file: Path

    def command(self, *arguments: str, role: Role | None) -> Result:
        own = {} if role is None else {"QLM_API_KEY": self.keys[role]}
        return qlm_command(*arguments, environment={f"QLM_{name.upper()}": value for name, value in self.tls.items()} | own)

    def reason(self, address: str, method: str, request: bytes, role: Role | None) -> str:
        return reason_of(qlm.Credentials(api_key="" if role is None else self.keys[role], **self.tls), address, method, request)


def reason_of(access: qlm.Credentials, address: str, method: str, request: bytes) -> str:
    """Reason in the error of a call, "" where it has none."""
    with access.channel(address) as channel:
        try:
            call = channel.unary_stream(method, bytes, bytes)
            next(iter(call(request, timeout=TIMEOUT_S, metadata=access.metadata)))
        except grpc.RpcError as failure:
            return from_rpc_error(failure).reason
    return ""


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    certificates = make_certificates(folder / "tls")
    key_file, service_key_file = folder / "keys.json", folder / "service.key"
    keys = {role: add_key(key_file, "acme", role) for role in Role}
    service_key_file.write_text(keys[Role.SERVICE])
    settings = {**certificates.settings(), "tls_client_ca_file": certificates.ca}
    settings |= {"key_file": str(key_file), "service_key_file": str(service_key_file)}
    environment = {f"QLM_SECURITY__{name.upper()}": value for name, value in settings.items()}
    quick = {"agent.simulated.time_scale": "20", "telemetry.log_level": "debug"}
    tls = {"ca_file": certificates.ca, "cert_file": certificates.cert, "cert_key_file": certificates.key}
    with RunningCluster(folder / "state", quick, environment) as cluster:
        yield Secure(cluster, tls, keys, key_file)
        assert cluster.interrupt() == 0, cluster.log()


def test_commands_are_answered_by_their_keys(secure: Secure) -> None:
    address = ("--address", secure.cluster.address)
    submit = ("submit", "--model", "mistral-7b", "--max-tokens", "4", *address, "Why?")
    done = secure.command(*submit, role=Role.CLIENT)
    assert done.exit_code == 0, done
    for role, reason in ((None, "UNAUTHENTICATED"), (Role.SERVICE, "PERMISSION_DENIED")):
        refused = secure.command(*submit, role=role)
        assert (refused.exit_code, reason in refused.stderr) == (1, True), refused
    assert secure.command("health", secure.cluster.address, role=None).exit_code == 0
    assert secure.command("pause", "mistral-7b", *address, role=Role.CLIENT).exit_code == 1
    for command in (("pause", "mistral-7b"), ("resume", "mistral-7b"), ("status",), ("profiles",)):
        done = secure.command(*command, *address, role=Role.OPERATOR)
        assert done.exit_code == 0, done
    done = secure.command("top", "--once", "--json", *address, role=Role.OPERATOR)
    view = json.loads(done.stdout)
    assert [part["problem"] for part in view["parts"]] == [""] * 3, view["parts"]
    assert [instance["part"]["problem"] for instance in view["instances"]] == [""] * 2


def test_a_service_answers_services_and_operators_alone(secure: Secure) -> None:
    for service, file in FILES.items():
        address = secure.cluster.state.of(service)[0].address
        for descriptor in file.DESCRIPTOR.services_by_name.values():
            for method in descriptor.methods:
                name = f"/{descriptor.full_name}/{method.name}"
                request = GetMessageClass(method.input_type)().SerializeToString()
                assert secure.reason(address, name, request, None) == "UNAUTHENTICATED", name
                assert secure.reason(address, name, request, Role.CLIENT) == "PERMISSION_DENIED", name
                if name in OF_SERVICES:
                    assert secure.reason(address, name, request, Role.OPERATOR) == "PERMISSION_DENIED", name
                    assert secure.reason(address, name, request, Role.SERVICE) in ("INVALID_FIELD", "UNKNOWN_INSTANCE"), name


def test_services_follow_the_file(secure: Secure) -> None:
    late = add_key(secure.key_file, "late", Role.OPERATOR)
    access = qlm.Credentials(api_key=late, **secure.tls)
    reads = [(secure.cluster.state.of(service)[0].address, method) for service, method in READ.items()]
    for wanted in ("", "UNAUTHENTICATED"):

        def followed(wanted: str = wanted) -> bool:
            return {reason_of(access, address, method, b"") for address, method in reads} == {wanted}

        wait_until(followed, TIMEOUT_S, "all services have read the file")
        revoke_key(secure.key_file, late)


def test_agents_report_to_the_planner(secure: Secure) -> None:
    logs = [path.read_text() for path in (secure.cluster.state_dir / "logs").glob("*.log")]
    assert len(logs) >= 5
    refused = [line for log in logs for line in log.splitlines() if "load_report_failed" in line and "StatusCode.UNAVAILABLE" not in line]
    assert refused == []
