"""A comparison policy of the user's own, from outside the tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qlm_planner.config import PlannerSettings
from qlm_planner.policies.selection import baseline_of
from qlm_planner.policy import Policy

MODULE = """
from qlm_planner.policies.balancers import Balancer

class Last(Balancer):
    def choose(self, names, key, loads, serving=()):
        return max(names)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "users_policies.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def test_the_setting_names_a_class(folder: Path) -> None:
    name = PlannerSettings(policy="users_policies:Last").policy
    assert type(baseline_of(Policy(lease_ttl_s=3.0, order=name))).__name__ == "Last"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nobody", "may be slo, fcfs"),
        ("nobody:Last", "No module named 'nobody'"),
        ("users_policies:First", "has no attribute 'First'"),
        ("users_policies:", "has no attribute"),
        ("pathlib:Path", "not a subclass of"),
    ],
)
def test_any_other_name_is_refused_with_the_reason(folder: Path, name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PlannerSettings(policy=name)


def test_it_runs_in_virtual_time(folder: Path) -> None:
    command = [sys.executable, "-m", "qlm_load", "simulate", "--policy", "users_policies:Last", "--requests", "20"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert '"policy": "users_policies:Last", "simulated": true, "requests": 20, "ended": 20' in done.stdout
