"""Files of `qlm deploy plan --apply`: an agent in front of the server that runs the map, and the map's profile."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml

from qlm_core.profiles.hardware_profile import HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_deploy.plan import Plan
from qlm_process.profile_file import dump_profiles

AGENT_FILE, PROFILE_FILE = "agent.yaml", "profile.yaml"


def server_command(plan: Plan) -> str:
    """vLLM's command line; WEIGHTS stands for the model's folder or name."""
    variables = [f"{name}={value}" for name, value in plan.environment]
    return shlex.join([*variables, "vllm", "serve", "WEIGHTS", "--served-model-name", plan.model, *plan.flags])


def write_agent(plan: Plan, profile: HardwareProfile, folder: Path) -> tuple[Path, Path]:
    """Writes the configuration of an agent (engine openai, the server on this host) and the profile; returns their paths. An agent's own
    engine vllm runs tensor parallel only."""
    document = {
        "models": [{"name": plan.model, "profile": plan.model}],
        "agent": {
            "name": re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{plan.model}-{plan.deployer}"),
            "gpu": profile.gpu,
            "n_gpu": profile.n_gpu,
            "engine": "openai",
            "models": [plan.model],
            "openai": {"base_url": "http://127.0.0.1:8000", "output": "text", "continues_chats": True},
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    head = f"# Start the server: {server_command(plan)}\n# Import its profile: qlm profiles import {PROFILE_FILE}\n"
    (folder / AGENT_FILE).write_text(head + yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    snapshot = ProfileSnapshot(version=0, made_s=0.0, hardware=(profile,))
    (folder / PROFILE_FILE).write_text(dump_profiles(snapshot), encoding="utf-8")
    return folder / AGENT_FILE, folder / PROFILE_FILE
