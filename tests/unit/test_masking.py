"""No secret of a URL, no local of a frame in logs or errors."""

from __future__ import annotations

import json
import logging
from typing import Any, Literal

import pytest
import structlog

from qlm_agent.engines.openai.errors import ServerRefused
from qlm_core.vocabulary.errors import ConfigError, NotFound, QlmError
from qlm_core.vocabulary.masking import masked
from qlm_process.config import load_config, parse_override
from qlm_process.logs import configure_logging
from qlm_process.settings import QueueSettings, Section, TelemetrySettings

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "text",
    [
        f"redis://:{SECRET}@h:1/0", f"rediss://user:{SECRET}@h", f"redis://{SECRET}@h", f"unix://:{SECRET}@/tmp/s.sock?db=1",
        f"redis://:{SECRET}/x@y@h:1", f"http://u:{SECRET}@h:80/v1/models says 500", f"at 'http://u:{SECRET}@h' and redis://:{SECRET}@h",
        f"redis://h?password={SECRET}&db=1", f"http://h/v1?api_key={SECRET}", f"http://h/v1?a=1&token={SECRET}",
        f"HTTP://U:{SECRET}@H",
    ],
)  # fmt: skip
def test_secrets_of_urls_are_masked(text: str) -> None:
    assert SECRET not in masked(text)
    assert "***" in masked(text)
    assert SECRET not in str(QlmError(text, details={"url": text})) + NotFound(text, details={"url": text}).details["url"]
    assert SECRET not in str(ServerRefused(text, 400))


@pytest.mark.parametrize("text", ["redis://h:1/0", "write to a@b.c", "http://h/v1?model=x&n=1", "key=5 token 7"])
def test_other_text_stays(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize("form", ["json", "console"])
def test_tracebacks_have_no_locals_and_lines_no_secrets(capsys: pytest.CaptureFixture[str], form: Literal["json", "console"]) -> None:
    configure_logging(TelemetrySettings(log_format=form), "gateway", "gateway-0")

    def fails(prompt: str, url: str) -> None:
        raise ValueError(f"no answer of {url}")

    prompt = "PROMPT-MARK"
    try:
        fails(prompt, f"redis://:{SECRET}@h")
    except ValueError as error:
        structlog.get_logger().error("rpc_failed", exc_info=error, url=f"redis://:{SECRET}@h")
        structlog.get_logger().error("group", exc_info=ExceptionGroup("two", [error]))
        logging.getLogger("asyncio").error("Task of %s", f"redis://:{SECRET}@h", exc_info=error)
    said = capsys.readouterr().err
    assert "ValueError" in said
    assert "fails" in said
    assert SECRET not in said
    assert prompt not in said
    if form == "json":
        assert [json.loads(line)["level"] for line in said.splitlines()] == ["error"] * 3


class Config(Section):
    queue: QueueSettings = QueueSettings()


@pytest.mark.parametrize(
    "given",
    [
        {"queue.url": f"redis:/:{SECRET}@h"}, {"queue.url": f"http://:{SECRET}@h"}, {"queue.url": f"{SECRET}"}, {"queue": f"redis://:{SECRET}@h"},
        {"queue": f"{{url: 'redis://:{SECRET}@h', x: 1}}"}, {"queue": f"[redis://:{SECRET}@h"}, {"queue": f"{{url: redis://:{SECRET}@h"},
        {"queue.url": f"[{SECRET}]"}, {"queue.url.x": f"redis://:{SECRET}@h"}, {"queue.name": f"{{password: {SECRET}}}"},
    ],
)  # fmt: skip
def test_a_wrong_setting_is_reported_without_its_secret(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="queue") as wrong:
        load_config(Config, None, overrides=given, environment={})
    assert SECRET not in wrong.value.message


def test_a_file_that_is_no_yaml_is_reported_by_line_without_its_text(tmp_path: Any) -> None:
    path = tmp_path / "qlm.yaml"
    path.write_text(f"queue:\n  name: a\n  url: 'redis://:{SECRET}@h\n")
    with pytest.raises(ConfigError, match="line 4") as wrong:
        load_config(Config, str(path), environment={})
    assert SECRET not in wrong.value.message
    with pytest.raises(ConfigError) as wrong:
        parse_override(f"queue.url:redis://:{SECRET}@h")
    assert SECRET not in wrong.value.message
