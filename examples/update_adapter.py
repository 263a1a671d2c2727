"""Stands for further training in docs/runtime.md: moves every number of an adapter by a few per cent of its tensor's spread.

python examples/update_adapter.py served/receiver
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHARE = 0.05

if __name__ == "__main__":
    path = Path(sys.argv[1]) / "adapter_model.safetensors" if len(sys.argv) == 2 else None
    if path is None or not path.is_file():
        sys.exit("usage: python examples/update_adapter.py FOLDER, which holds an adapter_model.safetensors")
    torch.manual_seed(0)
    moved = {}
    for name, held in load_file(path).items():
        noise = torch.randn(held.shape) * held.float().std()
        moved[name] = (held + SHARE * noise).to(held.dtype)
    save_file(moved, path)
    print(f"{path}: moved {len(moved)} tensors by about {SHARE:.0%} of their spread")
