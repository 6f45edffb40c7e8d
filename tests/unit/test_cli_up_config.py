"""What `qlm up` runs, from its settings."""

from __future__ import annotations

import json

import pytest

from qlm_cli.options import default_config_path
from qlm_cli.up.config import ProcessSpec, UpConfig, process_specs
from qlm_core.errors import ConfigError
from qlm_process.config import OVERRIDES_VARIABLE, load_config


def load(**overrides: str) -> UpConfig:
    return load_config(UpConfig, default_config_path(), overrides=overrides, environment={})


def settings(spec: ProcessSpec) -> dict[str, object]:
    found: dict[str, object] = json.loads(spec.environment[OVERRIDES_VARIABLE])
    return found


def test_the_shipped_configuration_has_two_gpus_and_one_of_each_service() -> None:
    specs = process_specs(load(), "qlm.yaml", {"agent.batch_max": "8"}, "redis://h:1")
    assert [(spec.service, spec.name) for spec in specs] == [
        ("gateway", "gateway-0"),
        ("planner", "planner-0"),
        ("estimator", "estimator-0"),
        ("agent", "a100-0"),
        ("agent", "h100-0"),
    ]
    command = specs[3].command
    assert command[1:7] == ("-m", "qlm_agent", "--config", "qlm.yaml", "--name", "a100-0")
    assert settings(specs[3])["agent.batch_max"] == "8"


def test_no_setting_stands_on_a_command_line() -> None:
    given = {"queue.url": "redis://:secret@h:1", "agent.openai.base_url": "http://u:secret@h"}
    for spec in process_specs(load(), "qlm.yaml", given, "redis://:secret@h:1"):
        assert not any("secret" in part for part in spec.command)
        assert settings(spec).items() >= given.items()
        assert load_config(UpConfig, None, environment=spec.environment).queue.url == "redis://:secret@h:1"


def test_a_whole_queue_section_that_was_given_does_not_hide_the_url() -> None:
    (first, *_) = process_specs(load(), "qlm.yaml", {"queue": "{name: other}"}, "redis://h:1")
    queue = load_config(UpConfig, None, environment=first.environment).queue
    assert (queue.name, queue.url) == ("other", "redis://h:1")
    (first, *_) = process_specs(load(), "qlm.yaml", {"queue.url": "redis://x", "queue": "{name: other}"}, "redis://h:1")
    assert load_config(UpConfig, None, environment=first.environment).queue.url == "redis://h:1"


def test_metrics_ports_follow_the_base() -> None:
    config = load(**{"up.metrics_port_base": "9100"})
    ports = [settings(spec)["telemetry.metrics_port"] for spec in process_specs(config, "f", {}, "u")]
    assert ports == [9100, 9101, 9102, 9103, 9104]


def test_two_processes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two processes are named 'a100-0'"):
        load(planners="[{name: a100-0}]")


def test_a_standby_is_one_more_entry() -> None:
    config = load(planners="[{name: planner-0}, {name: planner-1}]")
    assert [entry.name for entry in config.planners] == ["planner-0", "planner-1"]
