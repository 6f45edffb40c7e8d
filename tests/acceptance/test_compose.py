"""docker-compose.yml: valid for Debian's docker-compose 1.29, and its services get settings that they accept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlm_agent.config import AgentConfig, served_models
from qlm_cli.root import COMMANDS
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_process.config import KNOWN_SECTIONS, load_config
from qlm_process.identity.key_file import read_keys
from qlm_process.identity.keys import split_key
from qlm_queue.values import Durability

ROOT = Path(__file__).parents[2]
GPU_CONFIG = ROOT / "deploy" / "gpu.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
BUILT = {name: service for name, service in SERVICES.items() if "build" in service and name != "keys"}
AGENTS = {name: service for name, service in BUILT.items() if name.startswith("agent-")}
PROFILES = sorted({profile for service in SERVICES.values() for profile in service.get("profiles", ())})
MOUNTED_AT = "/etc/qlm/qlm.yaml"
TIMEOUT_S = 60
NO_SETTINGS = {"QLM_CONFIG", "QLM_API_KEY_FILE", "OTEL_EXPORTER_OTLP_ENDPOINT", "HOME", "USER"}
KEYS_AT = Path("/etc/qlm-keys")


def kind_of(service: Mapping[str, Any]) -> str:
    """gateway, planner, estimator or agent: the folder of its Dockerfile."""
    return Path(service["build"]["dockerfile"]).parent.name


def config_of(service: Mapping[str, Any]) -> Path:
    """The file that QLM_CONFIG_FILE has to name for it."""
    return GPU_CONFIG if service.get("profiles", ["simulated"]) != ["simulated"] else mounted_config(service)


def mounted_config(service: Mapping[str, Any]) -> Path:
    """The file of this project that the container sees at MOUNTED_AT, unless QLM_CONFIG_FILE names another."""
    ((source, options),) = [
        (volume.rpartition(f":{MOUNTED_AT}:")[0], volume.rpartition(":")[2]) for volume in service["volumes"] if f":{MOUNTED_AT}:" in volume
    ]
    assert options == "ro"
    variable, _, default = source.removeprefix("${").removesuffix("}").partition(":-")
    assert variable == "QLM_CONFIG_FILE"
    return ROOT / str(default)


def gpus_of(service: Mapping[str, Any]) -> list[str]:
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    assert all(device["driver"] == "nvidia" and device["capabilities"] == ["gpu"] for device in devices)
    return [gpu for device in devices for gpu in device["device_ids"]]


def test_services_of_each_profile() -> None:
    assert PROFILES == ["gpu", "gpu-1", "simulated"]
    always = Counter(kind_of(service) for service in BUILT.values() if "profiles" not in service)
    assert always == {"gateway": 1, "planner": 2, "estimator": 1}
    assert {profile: sum(profile in agent["profiles"] for agent in AGENTS.values()) for profile in PROFILES} == {
        "gpu": 1,
        "gpu-1": 1,
        "simulated": 2,
    }


@pytest.mark.parametrize("name", AGENTS)
def test_each_agent_has_one_gpu_of_its_own_and_a_simulated_one_none(name: str) -> None:
    gpus = gpus_of(AGENTS[name])
    if AGENTS[name]["profiles"] == ["simulated"]:
        assert gpus == []
        return
    assert len(gpus) == 1
    assert [other for other, agent in AGENTS.items() if gpus_of(agent) == gpus] == [name]


@pytest.mark.parametrize("name", BUILT)
def test_each_service_accepts_its_settings(name: str) -> None:
    service, kind = BUILT[name], kind_of(BUILT[name])
    dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
    assert f'ENTRYPOINT ["qlm", "{kind}"]' in dockerfile
    assert f"'.[{kind}]'" in dockerfile or ("ARG EXTRAS=agent\n" in dockerfile and '".[${EXTRAS}]"' in dockerfile and kind == "agent")
    flag, entry = service["command"]
    assert flag == "--name"

    environment: dict[str, str] = service["environment"]
    assert environment["QLM_CONFIG"] == MOUNTED_AT
    ours = {key: value for key, value in environment.items() if key not in NO_SETTINGS}
    assert all(key.startswith("QLM_") and key.split("__")[0].removeprefix("QLM_").lower() in KNOWN_SECTIONS for key in ours)

    cls = getattr(import_module(f"qlm_{kind}.config"), f"{kind.capitalize()}Config")
    config = load_config(cls, str(config_of(service)), f"{kind}s", entry, environment=ours)
    settings = getattr(config, kind)
    assert settings.name == entry
    assert config.queue.url == "redis://valkey:6379/0"
    assert (config.telemetry.log_format, config.telemetry.metrics_host, config.telemetry.metrics_port) == ("json", "0.0.0.0", 9464)
    keys = (config.security.key_file, config.security.service_key_file, environment["QLM_API_KEY_FILE"])
    assert keys == tuple(str(KEYS_AT / each) for each in ("keys.json", "service.key", "operator.key"))
    assert f"${{QLM_KEYS:-keys}}:{KEYS_AT}:ro" in service["volumes"]
    config.security.check_listen("listen", settings.listen)
    port = settings.listen.rpartition(":")[2]
    assert f"EXPOSE {port} 9464" in dockerfile
    # The others reach it by the name of its service; the health check and the host's clients by any address.
    assert settings.listen == f"0.0.0.0:{port}"
    assert kind == "gateway" or settings.advertise == f"{name}:{port}"


@pytest.mark.parametrize("path", [mounted_config(BUILT["gateway"]), GPU_CONFIG], ids=lambda path: path.name)
def test_both_apis_of_the_gateway_are_served_to_this_host_alone(path: Path) -> None:
    (gateway,) = yaml.safe_load(path.read_text())["gateways"]
    ports = [address.rpartition(":")[2] for address in (gateway["listen"], gateway["http"]["listen"])]
    variables = ("QLM_GRPC_PORT", "QLM_HTTP_PORT")
    assert BUILT["gateway"]["ports"] == [f"127.0.0.1:${{{name}:-{port}}}:{port}" for name, port in zip(variables, ports, strict=True)]


@pytest.mark.parametrize("path", [mounted_config(BUILT["gateway"]), GPU_CONFIG], ids=lambda path: path.name)
def test_every_entry_of_a_config_has_a_container(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    run = {
        (kind_of(service), service["command"][1]) for service in BUILT.values() if "profiles" not in service or config_of(service) == path
    }
    assert {(kind, entry["name"]) for kind in COMMANDS for entry in document.get(f"{kind}s", ())} == run
    assert {mounted_config(service) for service in BUILT.values()} == {mounted_config(BUILT["gateway"])}


@pytest.mark.parametrize("name", [name for name in AGENTS if gpus_of(AGENTS[name])])
def test_an_agent_with_a_gpu_runs_vllm_with_weights_that_it_sees(name: str) -> None:
    service = AGENTS[name]
    assert service["build"]["args"]["EXTRAS"] == "agent,vllm"
    config = load_config(AgentConfig, str(GPU_CONFIG), "agents", service["command"][1], environment={})
    assert (config.agent.engine, config.agent.vllm.device) == ("vllm", "cuda")
    models = [volume.split(":", 2)[1:] for volume in _without_variables(service["volumes"]) if "/etc/" not in volume]
    assert models == [["/models", "ro"]]
    assert all(model.weights.startswith("/models/") for model in config.models)
    assert set(served_models(config, shipped_snapshot())) == {model.name for model in config.models}


@pytest.mark.parametrize("name", SERVICES)
def test_each_container_is_bounded_and_writes_only_to_volumes_and_memory(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"]
    assert service["cpus"]
    assert service["cap_drop"] == ["ALL"]
    assert service["user"] == {"valkey": "999:1000", "keys": "root"}.get(name, "10001:10001")
    writable = {volume for volume in service["volumes"] if not volume.endswith(":ro")}
    assert writable == {"valkey": {"queue:/data"}, "keys": {f"${{QLM_KEYS:-keys}}:{KEYS_AT}"}}.get(name, set())


def test_the_first_start_makes_keys_and_a_later_one_keeps_them(tmp_path: Path) -> None:
    service, folder = SERVICES["keys"], tmp_path / "keys"
    folder.mkdir()
    (script,) = service["command"]
    # Here the files are this user's; in the container root gives them to the user of the services.
    script = script.replace(str(KEYS_AT), str(folder)).replace("chown ", ": ")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    made: list[dict[str, bytes]] = []
    for start in ("first", "second"):
        work = tmp_path / start
        work.mkdir()
        run = [*service["entrypoint"], script]
        done = subprocess.run(run, cwd=work, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        made.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert made[0] == made[1]
    assert made[0].keys() == {"keys.json", "client.key", "operator.key", "service.key"}
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}
    for key in read_keys(str(folder / "keys.json")):
        id_, secret = split_key(made[0][f"{key.role}.key"].decode().strip())
        assert key.id == id_
        assert key.matches(secret)


@pytest.mark.parametrize("name", SERVICES)
def test_each_container_is_watched_restarted_and_started_after_the_server(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == ("no" if name == "keys" else "unless-stopped")
    assert service["logging"]["options"] == {"max-size": "32m", "max-file": "2"}
    check = service["healthcheck"]["test"]
    if name == "keys":
        assert check == ["NONE"]
        return
    if name == "valkey":
        assert check == ["CMD-SHELL", "valkey-cli ping | grep -q PONG"]
        return
    port = {"gateway": 50051, "planner": 50052, "estimator": 50053, "agent": 50054}[kind_of(service)]
    assert check == ["CMD", "qlm", "health", f"127.0.0.1:{port}"]
    assert "health" in COMMANDS
    assert service["depends_on"] == {"valkey": {"condition": "service_healthy"}, "keys": {"condition": "service_completed_successfully"}}


def test_the_server_keeps_what_it_acknowledged() -> None:
    valkey = SERVICES["valkey"]
    program, *flags = valkey["command"]
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    assert program == "valkey-server"
    kept = {"--appendonly": "yes", "--appendfsync": "no", "--save": ""}
    assert options == {**kept, "--protected-mode": "no", "--stream-node-max-entries": "1"}
    assert valkey["volumes"] == ["queue:/data"]
    assert "queue" in COMPOSE["volumes"]
    assert "ports" not in valkey
    document = yaml.safe_load(mounted_config(BUILT["gateway"]).read_text())
    assert document["queue"]["durability"] == Durability.PROCESS  # what appendfsync no gives


@pytest.mark.parametrize("program", [("docker-compose",), ("docker", "compose")], ids=["v1", "v2"])
@pytest.mark.parametrize("profiles", [(), tuple(PROFILES)], ids="+".join)
def test_compose_reads_the_file(program: tuple[str, ...], profiles: tuple[str, ...]) -> None:
    if not _installed(program):
        assert program != ("docker-compose",) or "CI" not in os.environ, "docker-compose is not installed; CI needs it"
        pytest.skip(f"{' '.join(program)} is not installed")
    chosen = [part for profile in profiles for part in ("--profile", profile)]
    command = [*program, "-f", "docker-compose.yml", *chosen, "config"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QLM_", "OTEL_", "COMPOSE_"))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""
    # Compose understood the file as it is: 1.29 shows all services, v2 those of the profiles.
    understood = yaml.safe_load(done.stdout)["services"]
    wanted = {name for name, service in SERVICES.items() if "profiles" not in service or set(service["profiles"]) & set(profiles)}
    assert wanted <= set(understood) <= set(SERVICES)
    for name in wanted:
        assert gpus_of(understood[name]) == gpus_of(SERVICES[name])
        assert understood[name]["healthcheck"]["test"] == SERVICES[name]["healthcheck"]["test"]
        assert understood[name]["read_only"]


def _without_variables(texts: Sequence[str]) -> list[str]:
    return [re.sub(r"\$\{[^}]*\}", "", text) for text in texts]


def _installed(program: tuple[str, ...]) -> bool:
    if shutil.which(program[0]) is None:
        return False
    return subprocess.run([*program, "version"], capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0
