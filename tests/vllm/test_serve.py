"""`qlm serve` in front of vLLM's own API server: found as it is, spoken to in tokens, the same answers, also after the loss of an agent."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path

import yaml

from running_serve import PATIENCE_S, Served, serve
from running_vllm_server import CONTEXT_TOKENS, MODEL, RunningVllmServer

GREEDY = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True}


def test_answers_are_those_of_the_server_also_when_an_agent_is_killed(tmp_path: Path) -> None:
    server = RunningVllmServer().start()
    try:
        with serve(tmp_path / "state", server.url) as served:
            served.ready()
            (model,) = yaml.safe_load((tmp_path / "state" / "serve.yaml").read_text())["models"]
            assert (model["name"], model["context_tokens_max"]) == (MODEL, CONTEXT_TOKENS)
            (agent,) = yaml.safe_load((tmp_path / "state" / "serve.yaml").read_text())["agents"]
            assert agent["openai"]["output"] == "tokens", "its folder lies on this machine"
            content = "Tell me about the sea."
            messages = [{"role": "user", "content": content}]
            body = json.dumps({"model": MODEL, "messages": messages, **GREEDY}).encode()
            request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                expected = json.load(answer)["choices"][0]["message"]["content"]
            assert served.chat(MODEL, content, **GREEDY) == expected
            killing = threading.Timer(0.3, _kill_agent, [served])
            killing.start()
            assert served.chat(MODEL, content, **GREEDY) == expected
            killing.join()
            served.until("the agent started again", lambda state: state.of("agent")[0].restarts == 1)
    finally:
        server.close()


def test_vllm_on_this_machine_serves_the_folders_of_two_models(tmp_path: Path, tiny_models: tuple[Path, Path]) -> None:
    folders = [part for folder in tiny_models for part in ("--model", str(folder))]
    with serve(tmp_path / "state", "--engine", "vllm", "--gpus", "0", *folders) as served:
        served.ready()
        names = [folder.name for folder in tiny_models]
        assert {model["id"] for model in served.call("/v1/models")["data"]} == set(names)
        first, second = (served.chat(name, "Tell me about the sea.", temperature=0.0) for name in names)
        assert first != second, "two models take turns in one instance"
        assert served.chat(names[0], "Tell me about the sea.", temperature=0.0) == first != ""
        place = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"], "additionalProperties": False}
        tool = {"type": "function", "function": {"name": "weather", "parameters": place}}
        wanted = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 100}
        answer = served.call("/v1/chat/completions", {"model": names[0], "messages": [{"role": "user", "content": "?"}], **wanted})
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Paris"})


def _kill_agent(served: Served) -> None:
    os.kill(served.ready().of("agent")[0].pid, signal.SIGKILL)
