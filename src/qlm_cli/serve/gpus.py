"""This machine's NVIDIA GPUs, by the driver."""

from __future__ import annotations

import subprocess

CPU = "CPU"
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
    ("V100-SXM2-32GB", "V100-32GB"),
    ("V100-SXM3-32GB", "V100-32GB"),
    ("V100-PCIE-32GB", "V100-32GB"),
    ("V100S-PCIE-32GB", "V100-32GB"),
    ("RTX 3090", "RTX-3090"),
    ("RTX 4090", "RTX-4090"),
    ("RTX A6000", "RTX-A6000"),
    ("Tesla T4", "T4"),
)
"""Part of the driver's name -> the name in the hardware profiles and `gpu_facts.yaml`; the first that fits."""


def profile_name(gpu: str) -> str:
    """The GPU's name in the hardware profiles; the driver's if unknown."""
    return next((name for part, name in NAMES if part in gpu), gpu)


def nvidia_smi() -> tuple[list[list[str]], str]:
    """SMI_FIELDS of each GPU, and why there are none."""
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
