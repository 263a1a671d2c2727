"""What this machine has: versions, devices, attention kernels, memory, disk, and whether the hub answers."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from kvprofile.models.cache_dir import cache_dir

_PACKAGES = (
    "kvprofile", "torch", "transformers", "peft", "accelerate", "datasets", "evaluate", "safetensors", "gguf",
    "huggingface_hub", "tokenizers", "pyarrow", "numpy", "bitsandbytes", "flash-attn",
)  # fmt: skip
_HUB_SECONDS = 3


def describe(outputs: Path) -> dict[str, Any]:
    """Returns everything `kvprofile doctor` shows, as plain JSON values; never fails, unknown things are None.

    Args:
        outputs: The store whose disk is looked at; it need not exist.
    """
    cache = cache_dir()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "devices": devices(),
        "attention_kernels": attention_kernels(),
        "memory_free_bytes": psutil.virtual_memory().available,
        "cache": {"folder": str(cache), "bytes": _size(cache), "disk_free_bytes": _disk_free(cache)},
        "outputs": {"folder": str(outputs.absolute()), "disk_free_bytes": _disk_free(outputs)},
        "hub": hub(),
    }


def devices() -> list[dict[str, Any]]:
    """Returns the devices models can be loaded on, the one that `auto` takes first."""
    import torch

    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": torch.cuda.get_device_name(index),
                "bfloat16": torch.cuda.get_device_capability(index) >= (8, 0),
                "memory_free_bytes": free,
                "memory_bytes": total,
            }
        )
    # Every CPU computes bfloat16; only some have instructions for it, and on the others it is slower than float32.
    fast = any(getattr(torch.cpu, probe, bool)() for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    cpu = {"device": "cpu", "name": cpu_name(), "bfloat16": fast, "threads": torch.get_num_threads()}
    return [*found, cpu]


def attention_kernels() -> dict[str, bool]:
    """Returns Transformers' attention kernels and whether each can be used here."""
    from transformers import utils

    def available(probe: str) -> bool:
        try:
            return bool(getattr(utils, probe)())
        except Exception:
            return False

    return {
        "sdpa": True,
        "eager": True,
        "flex_attention": available("is_torch_flex_attn_available"),
        "flash_attention_2": available("is_flash_attn_2_available"),
        "flash_attention_3": available("is_flash_attn_3_available"),
    }


def hub() -> dict[str, Any]:
    """Returns the hub's address, whether it answers within seconds, and why not."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    address = constants.ENDPOINT
    if constants.HF_HUB_OFFLINE:
        return {"address": address, "reachable": False, "reason": "HF_HUB_OFFLINE is set"}
    try:
        status = get_session().head(address, timeout=_HUB_SECONDS).status_code
    except Exception as error:
        return {"address": address, "reachable": False, "reason": " ".join(str(error).split()) or type(error).__name__}
    if status >= 400:
        return {"address": address, "reachable": False, "reason": f"answers with HTTP status {status}"}
    return {"address": address, "reachable": True, "reason": None}


def _version(package: str) -> str | None:
    if package == "kvprofile":
        from kvprofile import __version__

        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Returns the processor as its maker calls it, where the system tells."""
    if sys.platform == "linux":
        try:
            lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            pass
    return platform.processor() or platform.machine()


def _size(folder: Path) -> int:
    sizes = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                sizes += (Path(parent) / name).lstat().st_size
            except OSError:
                continue
    return sizes


def _disk_free(folder: Path) -> int | None:
    """Returns the free bytes of the disk that a folder lies on, or would lie on once made."""
    folder = folder.absolute()
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None
