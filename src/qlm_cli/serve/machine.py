"""Finds what `qlm serve --engine vllm` needs on this machine: the folders of models, GPUs and memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from qlm_agent.engines.port import ModelLoadFailed
from qlm_agent.engines.vllm.folder import ModelFolder
from qlm_cli.serve.gpus import CPU, nvidia_smi, profile_name
from qlm_cli.serve.local import Host, LocalModel
from qlm_core.vocabulary.errors import ConfigError


def local_model(folder: Path) -> LocalModel:
    """A model named after its folder. Raises ConfigError for what is no model that can be planned for."""
    path = folder.resolve()
    try:
        read = ModelFolder.read(path.name, str(path))
    except ModelLoadFailed as error:
        raise ConfigError(f"--model {folder}: {error.message}") from error
    context, vocabulary = read.config.get("max_position_embeddings"), read.config.get("vocab_size")
    if read.facts is None or not (isinstance(context, int) and isinstance(vocabulary, int) and min(context, vocabulary) > 0):
        raise ConfigError(f"--model {folder}: config.json lacks layers, heads, hidden_size, max_position_embeddings or vocab_size")
    return LocalModel(name=path.name, folder=str(path), context_tokens=context, vocabulary_size=vocabulary, facts=read.facts)


def this_host(gpu: str | None, gpus: int | None) -> Host:
    """`gpu`: in place of the driver's name; `gpus`: at most so many, of those that CUDA_VISIBLE_DEVICES leaves. Raises ConfigError where
    there are fewer, and where they differ."""
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    rows, why = ([], "") if gpus == 0 else nvidia_smi()
    if why and shutil.which("nvidia-smi"):
        raise ConfigError(f"{why}; --gpus 0 computes on the CPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    ids = [str(number) for number in range(len(rows))] if visible is None else [each.strip() for each in visible.split(",") if each.strip()]
    ids = ids[:gpus] if rows else []
    if gpus and gpus > len(ids):
        raise ConfigError(f"--gpus {gpus}: {why or f'this machine has {len(ids)}'}")
    names = {profile_name(rows[int(each)][0]) for each in ids if each.isdecimal() and int(each) < len(rows)}
    if len(names) > 1 and gpu is None:
        raise ConfigError(f"this machine has unlike GPUs ({', '.join(sorted(names))}): --gpus takes the first, --gpu plans with one kind")
    if ids and not names and gpu is None:
        raise ConfigError("CUDA_VISIBLE_DEVICES names no GPU by its number: --gpu gives their kind")
    return Host(gpu=gpu or next(iter(names), CPU), gpus=tuple(ids), memory_gb=memory_gb)
