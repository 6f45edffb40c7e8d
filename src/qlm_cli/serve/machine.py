"""What `qlm serve --engine vllm` finds on this machine: the folders of models, GPUs and memory."""

from __future__ import annotations

import os
from pathlib import Path

from qlm_agent.engines.port import ModelLoadFailed
from qlm_agent.engines.vllm.folder import ModelFolder
from qlm_cli.serve.gpus import CPU, nvidia_smi, profile_name
from qlm_cli.serve.local import Host, LocalModel
from qlm_core.errors import ConfigError


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
    """`gpu`: in place of the driver's name; `gpus`: at most so many. Raises ConfigError where there are fewer, and where they differ."""
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    rows, why = ([], "") if gpus == 0 else nvidia_smi()
    if gpus and gpus > len(rows):
        raise ConfigError(f"--gpus {gpus}: {why or f'this machine has {len(rows)}'}")
    names = {profile_name(row[0]) for row in rows[:gpus]}
    if len(names) > 1 and gpu is None:
        raise ConfigError(f"this machine has unlike GPUs ({', '.join(sorted(names))}): --gpus takes the first, --gpu plans with one kind")
    return Host(gpu=gpu or next(iter(names), CPU), gpus=len(rows[:gpus]), memory_gb=memory_gb)
