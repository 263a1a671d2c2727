"""Devices that are not there: tensors of the CPU that say where they lie, and that no operation mixes.

Without two GPUs this is how tests tell that the engine never mixes tensors of different layers' devices. Real devices differ in
speed and kernels, not in what they refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from transformers import PreTrainedModel

from kvprofile.engine.decoder import find_layers

_TYPE = "pretended"
_MOVES = ("aten._to_copy", "aten.to.", "aten.copy_")
_TO_PYTHON = ("aten._local_scalar_dense", "aten.equal")
_INDEXING = ("aten.index.", "aten.index_put")  # indices may lie on the CPU

_tensor = torch.tensor


class _Placed(torch.Tensor):
    """A tensor of the CPU, `held`, that says it lies elsewhere."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, place: torch.device) -> _Placed:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), device=place, **layout)
        made.held = held
        placed: _Placed = made
        return placed

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()


class PretendedDevices(TorchDispatchMode):
    """Within it, tensors can be made on and moved to `device(0)`, `device(1)` …"""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def device(index: int) -> torch.device:
    return torch.device(_TYPE, index)


def registered() -> bool:
    """Registers the type of device in this process; returns whether this version of torch can."""
    if torch._C._get_privateuse1_backend_name() == _TYPE:
        return True
    set_up = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if set_up is not None:
        set_up(_TYPE)
    return set_up is not None


def tensor(data: Any, device: torch.device | None = None, **how: Any) -> torch.Tensor:
    """`torch.tensor`, which is made where no mode sees it."""
    return _tensor(data, **how).to(device or torch.device("cpu"))


@torch.inference_mode()
def spread(model: PreTrainedModel, places: Sequence[int], home: int = 0) -> PreTrainedModel:
    """Puts each layer on its device and all else on the device `home`, with accelerate's hooks, as `device_map` does."""
    layers = find_layers(model)
    inside = {id(part) for layer in layers for part in layer.modules()}
    for layer, place in zip(layers, places, strict=True):
        for part in layer.modules():
            _put(part, device(place))
        skipped = model._skip_keys_device_placement
        add_hook_to_module(layer, AlignDevicesHook(execution_device=device(place), skip_keys=skipped))
    for part in [*model.modules()]:
        if id(part) not in inside and _put(part, device(home)):
            add_hook_to_module(part, AlignDevicesHook(execution_device=device(home)))
    return model


def _put(part: torch.nn.Module, place: torch.device) -> bool:
    """Moves a module's own parameters and buffers; returns whether it has any."""
    for name, held in part._parameters.items():
        if held is not None:
            part._parameters[name] = torch.nn.Parameter(_Placed(_held(held.data), place), requires_grad=False)
    for name, buffer in part._buffers.items():
        if buffer is not None:
            part._buffers[name] = _Placed(_held(buffer), place)
    return bool(part._parameters or part._buffers)


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.held if isinstance(tensor, _Placed) else tensor


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operation on the CPU, if all its tensors lie on one device; numbers may lie on the CPU."""
    name, flat = str(function), tree_flatten((args, kwargs))[0]
    tensors = [one for one in flat if isinstance(one, torch.Tensor)]
    target = next((one for one in flat if isinstance(one, torch.device)), None)
    moves = name.startswith(_MOVES)
    read = tensors[:1] if moves else tensors
    if name.startswith(_INDEXING):
        read = tensors[:1] + [one for one in tensors[1:] if one.device.type != "cpu"]
    places = {one.device for one in read if one.dim() or isinstance(one, _Placed)}
    if len(places) > 1:
        raise RuntimeError(f"{name} of tensors on {sorted(map(str, places))}")
    args, kwargs = tree_map_only(torch.Tensor, _held, (args, kwargs))
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    result = function(*args, **kwargs)
    place = target or next(iter(places), torch.device("cpu"))
    if place.type != _TYPE or name.startswith(_TO_PYTHON):
        return result
    if function._schema.is_mutable and isinstance(result, torch.Tensor):
        return tensors[0]  # an operation in place
    return tree_map_only(torch.Tensor, lambda one: _Placed(one, place), result)
