"""The process that imports vLLM, with a vLLM that is none, and the end of engine processes as the agent waits for it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from qlm_agent.engines.vllm.process import template
from qlm_agent.engines.vllm.process.template import Template, TemplateProcess
from qlm_core.vocabulary.errors import ConfigError

MADE_UP = {
    "torch.py": "__version__ = '2.0'",
    "vllm/platforms.py": "class current_platform: device_type = 'cpu'",
    "vllm/model_executor/models/llama.py": "",
    "vllm/v1/core/sched/scheduler.py": "",
    "vllm/v1/engine/llm_engine.py": "",
}

GROUP = "sleep 60 & echo begun; wait"


@pytest.fixture
def group() -> subprocess.Popen[bytes]:
    """A process that leads a group of two."""
    process = subprocess.Popen(["sh", "-c", GROUP], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as said:
        said.readline()
    return process


class CountedTemplate(Template):
    """Keeps the processes that it started."""

    def __init__(self, folder: Path, version: str) -> None:
        for name, source in {**MADE_UP, "vllm/__init__.py": f"__version__ = '{version}'"}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(source)
        super().__init__("", {"PYTHONPATH": os.pathsep.join([str(folder), *(each for each in sys.path if each)])}, 60.0)
        self.launched: list[TemplateProcess] = []

    def launch(self, control: socket.socket) -> TemplateProcess:
        self.launched.append(super().launch(control))
        return self.launched[-1]


async def test_temporary_files_of_its_processes_go_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "system"
    system.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(system))
    template = CountedTemplate(tmp_path, "0.32.0")
    leaves = "import tempfile, uuid; open(f'{tempfile.gettempdir()}/vllm_dist_{uuid.uuid4().hex}', 'w').close()"
    (tmp_path / "torch.py").write_text(f"__version__ = '2.0'\n{leaves}\n")
    await template.start()
    [folder] = system.iterdir()
    assert [left.name.startswith("vllm_dist_") for left in folder.iterdir()] == [True]
    await template.stop()
    assert not list(system.iterdir())


async def test_one_that_ended_is_started_once_however_many_ask_for_it(tmp_path: Path) -> None:
    template = CountedTemplate(tmp_path, "0.32.0")
    await template.start()
    template.launched[0].end()
    async with asyncio.timeout(10.0):
        while not template._gone:
            await asyncio.sleep(0.001)
    try:
        await asyncio.gather(template.start(), template.start())
        assert len(template.launched) == 2
    finally:
        await template.stop()
        for launched in template.launched:
            launched.end()


async def test_a_vllm_that_is_too_old_is_named_at_every_start(tmp_path: Path) -> None:
    template = CountedTemplate(tmp_path, "0.31.2")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"vllm 0\.31\.2 is too old: 0\.32 or newer is needed; see docs/howto/own-models\.md"):
            await template.start()
    await template.stop()


async def test_another_qlm_beside_vllm_is_named(tmp_path: Path) -> None:
    """Its engine processes would understand the agent by half."""
    for name, source in {**MADE_UP, "vllm/__init__.py": "__version__ = '0.32.0'"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    path = os.pathsep.join(each for each in sys.path if each)
    same = Template("", {"PYTHONPATH": os.pathsep.join([str(tmp_path), path])}, 60.0)
    await same.start()
    await same.stop()
    shutil.copytree(Path(template.__file__).parents[3], tmp_path / "qlm_agent")
    with (tmp_path / "qlm_agent" / "engines" / "vllm" / "process" / "frames.py").open("a") as file:
        file.write("# changed\n")
    other = Template("", {"PYTHONPATH": os.pathsep.join([str(tmp_path), path])}, 60.0)
    with pytest.raises(ConfigError, match=r"agent\.vllm\.python: .* has another qlm-serving than the agent"):
        await other.start()


async def test_an_ended_process_is_gone_when_its_whole_group_is(group: subprocess.Popen[bytes]) -> None:
    waiting = asyncio.create_task(Template("", {}, 1.0).wait_for_exit(group.pid))
    await asyncio.sleep(0)
    assert not waiting.done()
    group.kill()
    group.wait()
    done, _ = await asyncio.wait([waiting], timeout=5 * template.GONE_POLL_S)
    assert not done, "a process of its group lives"
    os.killpg(group.pid, signal.SIGKILL)
    async with asyncio.timeout(10.0):
        await waiting


async def test_one_that_never_goes_is_not_waited_for_without_end(group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "EXIT_MAX_S", 0.05)
    await Template("", {}, 1.0).wait_for_exit(group.pid)
    os.killpg(group.pid, signal.SIGKILL)
    group.wait()


async def test_one_that_never_began_is_gone() -> None:
    await Template("", {}, 1.0).wait_for_exit(0)
