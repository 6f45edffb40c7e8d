"""Alert rules and the dashboard: valid, of metrics that exist, and fed by a real cluster through Debian's Prometheus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

import qlm
from qlm.errors import NotFound
from running_cluster import RunningCluster

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "dashboard.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
PATIENCE_S = 60.0


@pytest.fixture
def _prometheus() -> None:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        if os.environ.get("CI"):
            pytest.fail("no prometheus: apt-get install prometheus")
        pytest.skip("no prometheus")


def test_rules_and_dashboard_name_metrics_that_exist() -> None:
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    known = set(re.findall(r"^\| `(qlm_\w+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text(), re.MULTILINE))
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for each in (*rules, *EXPRESSIONS) for name in re.findall(r"\bqlm_\w+", each)}
    assert len(named) > 20
    assert named <= known, named - known
    assert {"qlm_gateway_oldest_request_seconds", "qlm_gateway_held_ratio"} <= set(re.findall(r"\bqlm_\w+", " ".join(EXPRESSIONS)))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)


def test_every_alert_says_what_to_do_in_words_that_exist() -> None:
    alerts = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len(alerts) >= 11
    reference = {page: (ROOT / "docs" / "reference" / f"{page}.md").read_text() for page in ("metrics", "configuration", "cli")}
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical"), alert["alert"]
        assert alert["annotations"]["summary"], alert["alert"]
        runbook = alert["annotations"]["runbook"]
        assert len(runbook.split()) >= 5, alert["alert"]
        for metric in re.findall(r"\bqlm_\w+", runbook):
            assert f"`{metric}`" in reference["metrics"], (alert["alert"], metric)
        for section, name in re.findall(r"\b(queue|planner|agent|gateway|estimator)\.(\w+)", runbook):
            assert f"## `{section}`" in reference["configuration"], (alert["alert"], section)
            assert re.search(rf"^\| `{name}[.`]", reference["configuration"], re.MULTILINE), (alert["alert"], name)
        for command in re.findall(r"\bqlm (\w+)", runbook):
            assert f"## `qlm {command}`" in reference["cli"], (alert["alert"], command)


@pytest.mark.usefixtures("_prometheus")
def test_alerts_fire_when_they_should_and_only_then() -> None:
    for command in (
        ("check", "rules", RULES),
        ("check", "config", RULES.with_name("prometheus.yml")),
        ("test", "rules", RULES.with_name("rules_test.yml")),
    ):
        done = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("_prometheus")
@pytest.mark.xdist_group("cluster")
def test_a_running_cluster_feeds_every_panel(cluster: RunningCluster, tmp_path: Path) -> None:
    with qlm.Client(cluster.address) as client:
        targets = [f"127.0.0.1:{process.metrics_port}" for process in cluster.state.processes if process.metrics_port]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "qlm", "static_configs": [{"targets": targets}]}],
        }
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = {"config.file": tmp_path / "prometheus.yml", "storage.tsdb.path": tmp_path / "data", "web.listen-address": address}
        command = ["prometheus", *(f"--{name}={value}" for name, value in arguments.items())]
        with (tmp_path / "prometheus.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            empty = set(EXPRESSIONS)
            while empty:
                assert time.monotonic() < deadline_s, empty
                client.submit("mistral-7b", "Why?", slo_s=60.0, max_tokens=20)
                with pytest.raises(NotFound):
                    client.submit("unknown", "Why?")
                empty = {each for each in empty if not _values(address, each)}
                time.sleep(0.2)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def _values(address: str, expression: str) -> list[Any]:
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=10) as answer:
            document = json.load(answer)
    except OSError as error:
        if getattr(error, "code", 503) == 503:
            return []  # not up yet
        raise
    found = document["data"]["result"]
    assert isinstance(found, list)
    return found
