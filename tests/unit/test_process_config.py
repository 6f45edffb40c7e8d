"""Settings: where they come from, which wins, and what a wrong one says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from qlm_core.vocabulary.errors import ConfigError
from qlm_process.config import load_config, parse_override
from qlm_process.settings import BoundsSettings, ListenAddress, ModelSettings, QueueSettings, Section
from qlm_queue.values import Bounds, Durability


class EngineSection(Section):
    time_scale: float = Field(1.0, gt=0)
    seed: int = 0


class AgentSection(Section):
    name: str = ""
    gpu: str = "A100"
    simulated: EngineSection = EngineSection()


class AgentConfig(Section):
    queue: QueueSettings = QueueSettings()
    models: tuple[ModelSettings, ...] = ()
    agent: AgentSection = AgentSection()


FILE = """
queue: {name: q, durability: disk}
models: [{name: m, profile: P}]
gateway: {listen: "127.0.0.1:1"}
agent: {gpu: B, simulated: {seed: 5, time_scale: 2}}
agents:
  - {name: a-0, gpu: C, simulated: {time_scale: 3}}
  - {name: a-1}
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "qlm.yaml"
    file.write_text(FILE)
    return str(file)


def load(path: str | None, environment: dict[str, str] | None = None, **overrides: object) -> AgentConfig:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(AgentConfig, path, environment=environment or {}, overrides=dotted)


def test_without_a_file_all_is_default() -> None:
    assert load(None) == AgentConfig()


def test_file_entry_environment_and_overrides_win_in_this_order(path: str) -> None:
    first = load_config(AgentConfig, path, "agents", "a-0", environment={})
    assert first.agent == AgentSection(name="a-0", gpu="C", simulated=EngineSection(seed=5, time_scale=3))
    assert first.queue.durability is Durability.DISK

    environment = {"QLM_AGENT__SIMULATED__TIME_SCALE": "4", "QLM_AGENT__GPU": "D", "QLM_QUEUE__NAME": "e"}
    second = load_config(AgentConfig, path, "agents", "a-0", environment=environment)
    assert second.agent == AgentSection(name="a-0", gpu="D", simulated=EngineSection(seed=5, time_scale=4))
    assert second.queue.name == "e"

    third = load_config(AgentConfig, path, "agents", "a-0", {"agent.gpu": "E", "models": "[{name: n, profile: P}]"}, environment)
    assert third.agent.gpu == "E"
    assert [model.name for model in third.models] == ["n"]


def test_an_override_may_name_an_entry_of_a_list(path: str) -> None:
    config = load_config(AgentConfig, path, "agents", "a-0", {"agents.a-0.simulated.time_scale": "9", "agents.a-1.gpu": "Z"}, {})
    assert config.agent.simulated.time_scale == 9
    assert config.agent.gpu == "C"
    with pytest.raises(ConfigError, match=r"agents\.a-7\.gpu: agents has the entries a-0, a-1"):
        load_config(AgentConfig, path, overrides={"agents.a-7.gpu": "x"}, environment={})


def test_a_name_without_a_list_is_taken(tmp_path: Path) -> None:
    assert load_config(AgentConfig, None, "agents", "solo", environment={}).agent.name == "solo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("queue: {durability: never}", r"queue\.durability: .*'process', 'disk' or 'replica'.*given: 'never'"),
        ("queue: {lease_ttl_s: -1}", r"queue\.lease_ttl_s: .*greater than 0.*given: -1"),
        ("queue: {lease_ttl_s: .nan}", r"queue\.lease_ttl_s: .*finite"),
        ("queue: {lease_ttl_s: 1, lease_renew_s: 1}", r"queue: .*lease_renew_s \(1\.0\) must be below lease_ttl_s"),
        ("queue: {url: 'http://h'}", r"queue\.url: .*redis"),
        ("queue: {bounds: {queue_mx: 1}}", r"queue\.bounds\.queue_mx: unknown setting; may be one of .*queue_max"),
        ("models: [{name: m, profil: P}]", r"models\.0\.profil: unknown setting; may be one of .*profile"),
        ("models: [{name: m}]", r"models\.0\.profile: Field required"),
        ("que: {}", r"que: unknown section; may be one of .*queue"),
        ("- 1", r"must be a mapping of sections"),
        ("queue: [", r"cannot be read as YAML"),
        ("agents: [{gpu: x}]", None),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_may_be(tmp_path: Path, text: str, message: str | None) -> None:
    file = tmp_path / "qlm.yaml"
    file.write_text(text)
    if message is None:
        with pytest.raises(ConfigError, match="agents: must be a list of entries with a name"):
            load_config(AgentConfig, str(file), "agents", "a-0", environment={})
    else:
        with pytest.raises(ConfigError, match=message):
            load(str(file))


def test_an_unknown_entry_and_an_unreadable_file_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="agents: has no entry 'a-9'; may be one of a-0, a-1"):
        load_config(AgentConfig, path, "agents", "a-9", environment={})
    with pytest.raises(ConfigError, match="cannot be read"):
        load("/nowhere/qlm.yaml")


def test_the_environment_may_name_the_file(path: str) -> None:
    assert load(None, {"QLM_CONFIG": path}).queue.name == "q"
    with pytest.raises(ConfigError, match="cannot be read"):
        load(None, {"QLM_CONFIG": "/nowhere/qlm.yaml"})


def test_overrides_are_parsed() -> None:
    assert parse_override("queue.url=redis://h/?a=b") == ("queue.url", "redis://h/?a=b")
    for text in ("queue.url", "=x", "a..b=x"):
        with pytest.raises(ConfigError, match=r"section\.name=value"):
            parse_override(text)


def test_the_bounds_are_those_of_the_queue() -> None:
    assert {field.name for field in fields(Bounds)} == set(BoundsSettings.model_fields)
    assert BoundsSettings().bounds() == Bounds()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("queue: {name: a}\ntelemetry: {}\nqueue: {name: b}\n", "'queue' is given twice, in lines 1 and 3"),
        ("queue:\n  name: a\n  url: redis://h\n  name: b\n", "'name' is given twice, in lines 2 and 4"),
        ("models:\n- name: a\n  profile: x\n  name: b\n", "'name' is given twice, in lines 2 and 4"),
        ("queue:\n  bounds:\n    queue_max: 1\n    queue_max: 1\n", "'queue_max' is given twice, in lines 3 and 4"),
        ("queue: {name: a,\n  name: b}\n", "'name' is given twice, in lines 1 and 2"),
        ("queue: {name: a, name: b}\n", "'name' is given twice, in lines 1 and 1"),
        ("on: {}\ntrue: {}\n", "'true' is given twice, in lines 1 and 2"),
        ("0x1: a\n1: b\n", "'1' is given twice, in lines 1 and 2"),
        ("? [a]\n: b\n", "unhashable key"),
        ("[" * 100_000, "too deep"),
        ("a: 2026-99-99\n", "ValueError"),
        ("queue: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("queue: *a\n", "undefined alias 'a'"),
        ("queue:\n\tname: a\n", r"line 2"),
        ("a\0b", "special characters are not allowed|ReaderError"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_its_lines(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "qlm.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as wrong:
        load_config(AgentConfig, str(path), environment={})
    assert wrong.value.message.startswith(str(path))


def test_merged_keys_may_be_set_again(tmp_path: Path) -> None:
    path = tmp_path / "qlm.yaml"
    path.write_text("load: &base {name: a, url: 'redis://h'}\nup: &more {<<: *base, name: c}\nqueue: {<<: *more, name: b}\n")
    assert load_config(AgentConfig, str(path), environment={}).queue.name == "b"


def test_a_setting_given_twice_in_one_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"queue: .*'name' is given twice"):
        load_config(AgentConfig, None, overrides={"queue": "{name: a, url: '',\n name: b}"}, environment={})


@pytest.mark.parametrize("port", ["65536", "99999", "70000", "65600", "-1", "", "x"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ListenAddress).validate_python(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address", ["h:0", "h:9", "h:50051", "[::]:59999", "h:64999", "h:65499", "h:65529", "h:65535", "unix:/tmp/a:99999"]
)
def test_a_port_up_to_65535_is_taken(address: str) -> None:
    assert TypeAdapter(ListenAddress).validate_python(address) == address
