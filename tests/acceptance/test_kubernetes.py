"""deploy/kubernetes: valid by the schemas of Kubernetes, and its pods get settings that they accept."""

from __future__ import annotations

import re
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_process.config import load_config

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"
BASE = yaml.safe_load((ROOT / "kustomization.yaml").read_text())
RESOURCES = [*BASE["resources"], "multihost.yaml"]
OBJECTS: list[dict[str, Any]] = [each for name in RESOURCES for each in yaml.safe_load_all((ROOT / name).read_text())]
PODS = {each["metadata"]["name"]: each["spec"]["template"] for each in OBJECTS if each["kind"] in ("Deployment", "StatefulSet")}
SERVICES = ("gateway", "planner", "estimator", "agent")
POD = {"$(POD_NAME)": "qlm-x-0", "$(POD_IP)": "10.0.0.7"}


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_the_schemas_of_kubernetes_accept_it(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_an_unknown_field_would_be_found() -> None:
    wrong = {**OBJECTS[0], "spec": {**OBJECTS[0]["spec"], "replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


@pytest.mark.parametrize("service", SERVICES)
def test_each_pod_accepts_its_settings(service: str) -> None:
    (container,) = PODS[f"qlm-{service}"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    for variable, value in POD.items():
        given = {name: text.replace(variable, value) for name, text in given.items()}
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert Path(given.pop("QLM_CONFIG")) == Path("/etc/qlm") / BASE["configMapGenerator"][0]["files"][0]
    assert mounts["/etc/qlm"] == "config"
    ours = {name: value for name, value in given.items() if name.startswith("QLM_")}
    cls = getattr(import_module(f"qlm_{service}.config"), f"{service.capitalize()}Config")
    config = load_config(cls, str(ROOT / "qlm.yaml"), environment=ours)
    settings = getattr(config, service)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert (settings.name, settings.listen) == ("qlm-x-0", f"0.0.0.0:{ports['grpc']}")
    assert service == "gateway" or settings.advertise == f"10.0.0.7:{ports['grpc']}"
    assert config.queue.url == "redis://qlm-valkey:6379/0"
    assert config.telemetry.metrics_port == ports["metrics"]
    assert str(Path(config.security.key_file).parent) in mounts
    config.security.check_listen("listen", settings.listen)
    if service == "gateway":
        assert settings.http.listen == f"0.0.0.0:{ports['http']}"
    if service == "agent":
        served = import_module("qlm_agent.config").served_models(config, shipped_snapshot())
        assert all(each.weights.startswith("/models/") for each in config.models)
        assert served
        assert settings.n_gpu == container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_server_of_the_queue_is_that_of_compose() -> None:
    compose = yaml.safe_load((ROOT.parents[1] / "docker-compose.yml").read_text())["services"]["valkey"]
    assert PODS["qlm-valkey"]["spec"]["containers"][0]["args"] == compose["command"]


def test_a_model_over_two_hosts_has_a_rank_a_host_and_as_many_gpus_as_it_requests() -> None:
    (stateful,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == ("StatefulSet", "qlm-vllm")]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    sizes = {name: int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)\b", script)}
    assert sizes["nnodes"] == sizes["pipeline-parallel-size"] == stateful["spec"]["replicas"]
    assert sizes["tensor-parallel-size"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert sizes["port"] == container["ports"][0]["containerPort"]
    for rank in range(stateful["spec"]["replicas"]):
        shown = ["sh", "-c", script.replace("exec vllm", "echo vllm")]
        started = subprocess.run(shown, env={"RANK": str(rank)}, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        assert started[started.index("--node-rank") + 1] == str(rank)
        assert ("--headless" in started) == (rank > 0)


@pytest.mark.parametrize("name", PODS)
def test_pods_run_as_nobody_and_write_only_to_volumes(name: str) -> None:
    spec = PODS[name]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    assert {each["name"] for each in container["volumeMounts"]} >= {each["name"] for each in spec.get("volumes", ())}


def test_network_policies_select_every_pod() -> None:
    labels = {name: pod["metadata"]["labels"]["app"] for name, pod in PODS.items()}
    selected: set[str] = set()
    for each in OBJECTS:
        if each["kind"] == "NetworkPolicy":
            selector = each["spec"]["podSelector"]
            selected |= {*selector.get("matchLabels", {}).values()}
            selected |= {value for rule in selector.get("matchExpressions", ()) for value in rule["values"]}
    assert selected == set(labels.values())


def test_the_scaled_object_names_a_metric_and_a_set_that_exist() -> None:
    scaled = yaml.safe_load((ROOT / "monitoring" / "scaledobject.yaml").read_text())["spec"]
    assert scaled["scaleTargetRef"]["name"] in PODS
    metrics = (ROOT.parents[1] / "docs" / "reference" / "metrics.md").read_text()
    assert "qlm_planner_advised_instances" in scaled["triggers"][0]["metadata"]["query"]
    assert "`qlm_planner_advised_instances`" in metrics


def test_the_service_monitor_finds_the_metrics_of_every_service() -> None:
    service, monitor = yaml.safe_load_all((ROOT / "monitoring" / "servicemonitor.yaml").read_text())
    kubernetes_validate.validate(service, "1.31", strict=True)
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert [each["port"] for each in monitor["spec"]["endpoints"]] == [port["name"]]
    for name in SERVICES:
        pod = PODS[f"qlm-{name}"]
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ports = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        assert ports[port["targetPort"]] == port["port"]
