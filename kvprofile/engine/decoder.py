"""The adapter to a Transformers causal language model: finds its layers, runs some of them, hides argument names that moved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvprofile.engine.attention import NotShareable, sharing
from kvprofile.engine.cache import KV, AllWritten, ContextKV, RowsCache, empty_cache, read_cache
from kvprofile.errors import BadInput, GateFailed, is_out_of_memory
from kvprofile.layers import LayerRange


class Decoder:
    """One causal language model as the engine sees it.

    Attributes:
        model: The model.
        layers: Its decoder layers.
        devices: Where each layer runs.
        shares_contexts: Whether rows can read a context where it lies.

    Raises:
        BadInput: If the model is not a decoder with one stack of layers.
        GateFailed: If its layers keep any state but keys and values.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers = find_layers(model)
        parameters = inspect.signature(model.forward).parameters
        # NOTE: Transformers 5.24 renamed `past_key_values` to `cache`; the old name goes away in 5.40.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._can_keep = "logits_to_keep" in parameters
        self._layer_returns_tuple = False
        self._probe()
        self.shares_contexts = self._can_share()

    @property
    def all_layers(self) -> LayerRange:
        return LayerRange(0, len(self.layers))

    @property
    def input_device(self) -> torch.device:
        """Where token ids go in. Offloaded embeddings are nowhere until accelerate's hooks fetch them, with what they read."""
        own: torch.device = self.model.device
        return torch.device("cpu") if own.type == "meta" else own

    @torch.inference_mode()
    def own_devices(self, context: ContextKV) -> ContextKV:
        """Returns a context with the K/V of every layer on the layer's device; what is there already is the same object."""
        return tuple(
            kv if kv.keys.device == device else KV(kv.keys.to(device), kv.values.to(device))
            for kv, device in zip(context, self.devices, strict=True)
        )

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> tuple[ContextKV, list[torch.Tensor]]:
        """Runs a context through all layers.

        Returns:
            K/V of every layer, and the hidden states entering every layer, `(1, S, E)` each.
        """
        return self.recompute_with_states(token_ids, self.all_layers, None)

    @torch.inference_mode()
    def recompute(
        self, token_ids: Sequence[int], group: LayerRange, entering: torch.Tensor | None, keys_end_it: bool = False
    ) -> ContextKV:
        """Runs a context through some layers only.

        Args:
            token_ids: The context.
            group: The layers that run.
            entering: Hidden states entering layer `group.start`, `(1, S, E)`; None for the model's own embeddings, which is
                right for `group.start == 0` alone.
            keys_end_it: Whether to stop as soon as the last layer's K/V are there; its attention and MLP serve nobody.

        Returns:
            K/V of the layers of `group`, first one first.
        """
        with self._only(group, entering):
            return self._context_pass(token_ids, group, keys_end_it)

    @torch.inference_mode()
    def recompute_with_states(
        self, token_ids: Sequence[int], group: LayerRange, entering: torch.Tensor | None
    ) -> tuple[ContextKV, list[torch.Tensor]]:
        """As `recompute`, for a reader that may go on from here.

        Returns:
            K/V of the layers of `group`, and the hidden states entering layers `group.start … group.stop`, the last of which is
            not there if `group` ends the model; `(1, S, E)` each.
        """
        noted = self.layers[group.start : group.stop + 1]
        with self._only(group, entering), _noting(noted) as states:
            return self._context_pass(token_ids, group), states

    @torch.inference_mode()
    def logits(
        self, token_ids: torch.Tensor, cache: Cache, keep: int, parents: Sequence[Sequence[int]] = ()
    ) -> torch.Tensor:
        """Runs new tokens behind what the cache holds, and adds them to it.

        Args:
            token_ids: `(B, T)` int64.
            cache: From `prefilled_cache`, `empty_cache` or `rows_cache`.
            keep: Last tokens whose logits are wanted.
            parents: For every layer, which row of the layer before each of its rows goes on from; empty if rows stay as they are.

        Returns:
            `(B, keep, vocabulary)` float32.
        """
        # As indices: the rows' last states then lie side by side, and the head is one product.
        last = torch.arange(token_ids.shape[1] - keep, token_ids.shape[1])
        options = {"logits_to_keep": last} if self._can_keep else {}
        logits: torch.Tensor = self._behind(self.model, token_ids, cache, parents, **options).logits
        return logits[:, -keep:].float()

    @torch.inference_mode()
    def read(self, token_ids: torch.Tensor, cache: RowsCache, parents: Sequence[Sequence[int]]) -> None:
        """Runs new tokens behind what the cache holds for the sake of their K/V alone; arguments as for `logits`."""
        cache.ends_at = len(self.layers) - 1
        with suppress(AllWritten):
            self._behind(self.model.base_model, token_ids, cache, parents)
        cache.ends_at = None

    @contextmanager
    def before_layers(self, call: Callable[[int], None]) -> Iterator[None]:
        """Has every pass call `call` with a layer's index before the layer runs; what it raises ends the pass."""
        hooks = [
            layer.register_forward_pre_hook(partial(_announce, call, index)) for index, layer in enumerate(self.layers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def context_like(self, tokens: int) -> tuple[ContextKV, torch.Tensor]:
        """Returns what a prefill of S tokens leaves, without data (device `meta`).

        Returns:
            K/V of every layer, and the hidden states entering a layer, `(1, S, E)`.
        """
        kv = [KV(*(_of_length(part, tokens) for part in probed)) for probed in self._probed_kv]
        return tuple(kv), _of_length(self._probed_hidden, tokens)

    def _behind(
        self, model: nn.Module, token_ids: torch.Tensor, cache: Cache, parents: Sequence[Sequence[int]], **options: Any
    ) -> Any:
        with ExitStack() as stack:
            if isinstance(cache, RowsCache) and not cache.joined:
                stack.enter_context(sharing(self.model.config, cache))
            if parents:
                stack.enter_context(self._branching(parents))
            return model(
                input_ids=token_ids.to(self.input_device), use_cache=True, **{self._cache_name: cache}, **options
            )

    def rows_cache(self, contexts: Sequence[Sequence[KV]], room: int) -> RowsCache:
        """Returns a cache of rows that read the given contexts, for each layer, with room for more tokens."""
        return RowsCache(contexts, room, joined=not self.shares_contexts)

    def _context_pass(self, token_ids: Sequence[int], group: LayerRange, keys_end_it: bool = False) -> ContextKV:
        cache = empty_cache()
        cache.ends_at = group.stop - 1 if keys_end_it else None
        ids = torch.tensor([list(token_ids)], device=self.input_device)
        with suppress(AllWritten):
            self.model.base_model(input_ids=ids, use_cache=True, **{self._cache_name: cache})
        return read_cache(cache, range(*group), len(token_ids))

    @contextmanager
    def _only(self, group: LayerRange, entering: torch.Tensor | None) -> Iterator[None]:
        """Lets the layers of `group` run and every other layer hand its input on.

        The model's own forward still builds masks, positions and rotary tables, so every architecture keeps its ways. Replacing
        the layers' `forward` (not the layers) leaves hooks and offloading by accelerate in place but unused for skipped layers.
        """
        skipped = [layer for index, layer in enumerate(self.layers) if not group.start <= index < group.stop]
        own = [layer.__dict__.get("forward") for layer in skipped]
        hook = None
        if entering is not None:
            hook = self.layers[group.start].register_forward_pre_hook(partial(_enter, entering), with_kwargs=True)
        try:
            for layer in skipped:
                layer.forward = self._hand_on
            yield
        finally:
            for layer, forward in zip(skipped, own, strict=True):
                if forward is None:
                    del layer.forward
                else:
                    layer.forward = forward
            if hook is not None:
                hook.remove()

    @contextmanager
    def _branching(self, parents: Sequence[Sequence[int]]) -> Iterator[None]:
        """Lets every layer begin with rows of the layer before, chosen by index."""
        handles = []
        for layer, chosen in zip(self.layers, parents, strict=True):
            if tuple(chosen) != tuple(range(len(chosen))):
                handles.append(layer.register_forward_pre_hook(partial(_branch, list(chosen)), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hand_on(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        return (hidden,) if self._layer_returns_tuple else hidden

    @torch.inference_mode()
    def _probe(self) -> None:
        """Runs two tokens once, to learn what a layer returns and to refuse models with other state than K/V."""
        returned: list[Any] = []
        hook = self.layers[0].register_forward_hook(lambda _module, _args, output: returned.append(output))
        try:
            kv = self._context_pass((0, 1), self.all_layers)
        except (AttributeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            raise GateFailed(
                f"{type(self.model).__name__} does not run with a plain key-value cache ({error}); kvprofile needs a decoder "
                "whose layers all cache keys and values"
            ) from error
        finally:
            hook.remove()
        if len(returned) != 1 or len(kv) != len(self.layers):
            raise GateFailed(f"{type(self.model).__name__} does not run its layers once each, in order")
        self._layer_returns_tuple = isinstance(returned[0], tuple)
        hidden = returned[0][0] if self._layer_returns_tuple else returned[0]
        self.devices = tuple(keys.device for keys, _ in kv)
        self._probed_kv = [KV(keys.to("meta"), values.to("meta")) for keys, values in kv]
        self._probed_hidden = hidden.to("meta")

    @torch.inference_mode()
    def _can_share(self) -> bool:
        """Whether all layers attend through Transformers' `AttentionInterface`, with nothing that ours does not honour."""
        context = self._context_pass((0, 1), self.all_layers)
        cache = RowsCache([[kv] for kv in context], 1, joined=False)
        try:
            self.logits(torch.tensor([[0]]), cache, keep=1)
        except (NotShareable, RuntimeError) as error:
            if is_out_of_memory(error):  # any other: own tokens alone do not fit the mask of a model's own attention
                raise
            return False
        return cache.attended == set(range(len(self.layers)))


def find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the decoder layers, first one first.

    Raises:
        BadInput: If the model is an encoder, an encoder-decoder or has no single stack of layers.
    """
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise BadInput(f"{name} is an encoder–decoder model; kvprofile needs a decoder-only causal language model")
    if model.get_output_embeddings() is None:
        raise BadInput(f"{name} has no language-model head; kvprofile needs a decoder-only causal language model")
    stacks = [
        module
        for module in model.base_model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(stacks) != 1:
        raise BadInput(
            f"{name} has no single stack of {config.num_hidden_layers} decoder layers that kvprofile can address"
        )
    return list(stacks[0])


@contextmanager
def _noting(layers: Sequence[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collects the hidden states that enter some layers, as hooks that were there before hand them over."""
    entering: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: entering.append(_hidden(args, kwargs)), with_kwargs=True
        )
        for layer in layers
    ]
    try:
        yield entering
    finally:
        for hook in hooks:
            hook.remove()


def _announce(call: Callable[[int], None], layer: int, *_: Any) -> None:
    call(layer)


def _of_length(probed: torch.Tensor, tokens: int) -> torch.Tensor:
    return probed.new_empty((*probed.shape[:-2], tokens, probed.shape[-1]))


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _with_hidden(
    hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})


def _enter(
    entering: torch.Tensor, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _with_hidden(entering.to(_hidden(args, kwargs).device), args, kwargs)


def _branch(
    parents: list[int], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden = _hidden(args, kwargs)
    return _with_hidden(hidden.index_select(0, torch.tensor(parents, device=hidden.device)), args, kwargs)
