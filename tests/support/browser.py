"""Debian's Chromium without a screen, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATIENCE_S = 60.0
POLL_S = 0.1
MESSAGE_BYTES_MAX = 64 << 20
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip


class Tab:
    """One page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        """Exceptions, and messages of the console that are errors: a broken policy is one."""

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("method") == "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
                if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                    self.problems.append(message["params"]["entry"]["text"])
                if message.get("id") == number:
                    assert "error" not in message, message
                    result: dict[str, Any] = message["result"]
                    return result

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; of a promise its result."""
        done = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def until(self, expression: str, what: str) -> Any:
        """Waits for an expression to be true, and returns its value."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        while not (value := await self.evaluate(expression)):
            assert loop.time() < deadline_s, (
                f"never happened: {what}\n{self.problems[-3:]}\n{await self.evaluate('document.body.innerText')}"
            )
            await asyncio.sleep(POLL_S)
        return value

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def resize(self, width: int, height: int) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    async def prefer(self, scheme: str) -> None:
        """ "light" or "dark"."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


def chromium() -> str:
    """Path of the browser. Skips the test where there is none; in CI that is a failure."""
    found = shutil.which("chromium")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium: apt-get install chromium")
        pytest.skip("no chromium")
    return found


@asynccontextmanager
async def opened_tab(folder: Path) -> AsyncIterator[Tab]:
    """A new browser with its profile in `folder`."""
    program = chromium()
    with (folder / "chromium.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank", stdout=log, stderr=log
        )
    try:
        port_file = folder / "profile" / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not (port_file.exists() and port_file.read_text().count("\n")):
                assert process.returncode is None, (folder / "chromium.log").read_text()
                await asyncio.sleep(POLL_S)
        base = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{base}/json/list") as answer:
                (page,) = [each for each in await answer.json() if each["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=MESSAGE_BYTES_MAX) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
