"""Keys, their file, who may call which method, and what a client shows."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

import qlm
from identity_files import add_key, revoke_key
from qlm.api.v1 import agent_pb2, estimator_pb2, planner_pb2
from qlm.credentials import credentials_of
from qlm_core.vocabulary.errors import ConfigError, PermissionDenied, Unauthenticated
from qlm_process.identity.guard import OF_OPERATORS, OF_SERVICES, check_role
from qlm_process.identity.key_file import edited, read_keys
from qlm_process.identity.key_ring import KeyRing
from qlm_process.identity.keys import Role
from qlm_process.settings import SecuritySettings


def test_the_file_holds_no_key_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "acme")
    assert key.split("_")[2] not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyRing(str(path)).find(key).tenant == "acme"


def test_the_hash_is_salted(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", "acme")
    (row,) = read_keys(str(tmp_path / "keys.json"))
    secret = key.split("_")[2]
    assert row.matches(secret)
    assert not row.model_copy(update={"salt": "0" * 32}).matches(secret)


def test_only_the_whole_key_is_found(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, other = add_key(path, "acme"), add_key(path, "other")
    ring = KeyRing(str(path))
    crossed = "_".join((*key.split("_")[:2], other.split("_")[2]))
    unknown, secret = f"qlm_{'0' * 8}_{key.split('_')[2]}", key.split("_")[2]
    for wrong in ("", "qlm", "qlm_", key[:-1], key + "0", key.upper(), secret, crossed, unknown, "é" + key, key + "\udcff"):
        with pytest.raises(Unauthenticated):
            ring.find(wrong)


def test_writers_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    path, made = tmp_path / "keys.json", list[str]()

    def add() -> None:
        made.extend(add_key(path, "acme") for _ in range(5))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ring = KeyRing(str(path))
    assert len(made) == len(read_keys(str(path))) == 20
    assert {ring.find(key).tenant for key in made} == {"acme"}


def test_an_edit_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "acme")

    def fail() -> None:
        with edited(str(path)) as rows:
            rows.clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert KeyRing(str(path)).find(key)
    revoke_key(path, key)
    assert read_keys(str(path)) == ()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["keys.json", "keys.json.lock"]


@pytest.mark.parametrize("text", ["mark", "{", '{"keys": [{"id": "mark"}]}', '{"mark": 1}', '{"keys": "mark"}', "[]"])
def test_a_damaged_file_is_refused_without_being_quoted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"security\.key_file") as error:
        KeyRing(str(path))
    assert "mark" not in error.value.message
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(str(tmp_path / "none"))


def test_every_method_of_a_service_has_its_callers() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in (planner_pb2, estimator_pb2, agent_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods >= OF_SERVICES | OF_OPERATORS
    for method in methods:
        for role in Role:
            allowed = role is not Role.CLIENT and not (method in OF_SERVICES and role is Role.OPERATOR)
            if allowed and not (method in OF_OPERATORS and role is Role.SERVICE):
                check_role(method, role)
            else:
                with pytest.raises(PermissionDenied):
                    check_role(method, role)


def test_credentials_come_from_files_or_the_environment_and_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("qlm_mark\n")
    assert credentials_of({"QLM_API_KEY_FILE": str(path), "QLM_CA_FILE": "ca"}) == qlm.Credentials(api_key="qlm_mark", ca_file="ca")
    assert credentials_of({"QLM_API_KEY": "own", "QLM_API_KEY_FILE": str(path)}).metadata == (("authorization", "Bearer own"),)
    assert credentials_of({}).metadata == ()
    assert "qlm_mark" not in repr(qlm.Credentials(api_key="qlm_mark"))
    (tmp_path / "empty").write_text("\n")
    for wrong in ({"QLM_API_KEY_FILE": str(tmp_path / "empty")}, {"QLM_API_KEY_FILE": str(tmp_path)}, {"QLM_API_KEY": "mark\nmark"}):
        with pytest.raises(ConfigError) as error:
            credentials_of(wrong)
        assert "mark" not in error.value.message
    with pytest.raises(ConfigError, match="cert_key_file"):
        qlm.Credentials(ca_file="a", cert_file="b")
    with pytest.raises(ConfigError, match="ca_file"):
        qlm.Credentials(cert_file="a", cert_key_file="b")


def test_half_of_tls_is_refused() -> None:
    for half in ({"tls_cert_file": "a"}, {"tls_cert_file": "a", "tls_key_file": "b"}, {"tls_client_ca_file": "a"}):
        with pytest.raises(ValueError, match="tls_"):
            SecuritySettings.model_validate(half)
