"""Whether two models are a pair: the receiver can read keys and values of the sender, and both read the same ids.

Whether reuse is any good is not judged here; that is what a sweep measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from kvprofile.errors import BadInput
from kvprofile.models.architecture import head_width, key_value_heads
from kvprofile.models.distance import LayerDistance, layer_distances
from kvprofile.models.loading import LoadedModel

PROBES = (
    "The quick brown fox doesn't jump over the lazy dogs; it's 7 o'clock, isn't it?",
    "def total(items: list[int]) -> int:\n    return sum(i for i in items if i % 2 == 0)  # even\n\tx != y",
    "Zürich, naïve, Ελλάδα, Москва, 東京都, العربية, 한국어, हिन्दी, 🙂🚀",
    "3.14159 1,000,000 2026-01-31 0xFF 1e-9 $12.50 50%",
    "  two  spaces\n\n\nthree lines\t\ttabs   ",
)
"""Texts that tokenizers of different families cut differently."""


class Reason(NamedTuple):
    """One thing that was compared.

    Attributes:
        ok: Whether both models agree.
        fatal: Whether they are no pair if they do not.
        detail: The common value, or what differs.
    """

    name: str
    ok: bool
    fatal: bool
    detail: str


class Compatibility(NamedTuple):
    """The outcome of `compare`.

    Attributes:
        distances: By layer; empty for models that are no pair.
    """

    reasons: list[Reason]
    distances: list[LayerDistance]

    @property
    def obstacles(self) -> list[Reason]:
        """What makes the models no pair."""
        return [reason for reason in self.reasons if reason.fatal and not reason.ok]

    @property
    def ok(self) -> bool:
        return not self.obstacles

    def require(self, sender: str, receiver: str) -> None:
        """Raises BadInput with the first obstacle if the models named are no pair."""
        if not self.obstacles:
            return
        first, more = self.obstacles[0], len(self.obstacles) - 1
        mend = "load both with one --dtype" if first.name == "dtype" else "use two fine-tunes of one base"
        others = f" (and {more} more, see kvprofile check)" if more else ""
        raise BadInput(
            f'"{receiver}" cannot read the cache of "{sender}": {first.name} differs, {first.detail}{others}; {mend}'
        )


def compare(
    sender: LoadedModel,
    receiver: LoadedModel,
    sample_texts: Sequence[str] = (),
    *,
    chat_template: bool = True,
    distances: bool = True,
) -> Compatibility:
    """Returns whether the receiver can read the sender's cache, with every reason, and how far apart their weights are.

    Args:
        sender: The model that writes the cache.
        receiver: The model that reads it; its tokenizer and template make the ids of every arm.
        sample_texts: Texts to tokenise with both besides `PROBES`.
        chat_template: Whether prompts go through the receiver's template, whose special tokens the sender must know.
        distances: Whether to compute `Compatibility.distances`, which reads all key and value projections.
    """
    reasons = [*_shape(sender, receiver), *_tokenizers(sender, receiver, sample_texts, chat_template)]
    found = Compatibility(reasons, [])
    if distances and not any(reason.name in _SHAPES for reason in found.obstacles):
        return found._replace(distances=layer_distances(sender.model, receiver.model))
    return found


_CONFIG_VALUES: dict[str, Callable[[PretrainedConfig], Any]] = {
    "layers": lambda c: c.num_hidden_layers,
    "attention heads": lambda c: c.num_attention_heads,
    "key-value heads": key_value_heads,
    "head width": head_width,
    "hidden width": lambda c: c.hidden_size,
    "latent attention": lambda c: _given(c, ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")),
    "rotary embedding": lambda c: _rotary(c),
    "attention kinds": lambda c: _kinds(c),
}
_SHAPES = frozenset({"architecture", *_CONFIG_VALUES})
_ROTARY_KEYS = (
    "rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "rotary_dim",
    "rotary_emb_base", "no_rope_layers", "alibi", "position_embedding_type",
)  # fmt: skip


def _shape(sender: LoadedModel, receiver: LoadedModel) -> Iterator[Reason]:
    yield _reason("architecture", _architecture(sender), _architecture(receiver))
    ours, theirs = (model.model.config.get_text_config(decoder=True) for model in (sender, receiver))
    for name, value in _CONFIG_VALUES.items():
        yield _reason(name, value(ours), value(theirs))
    yield _reason("embedding rows", ours.vocab_size, theirs.vocab_size, fatal=False)
    yield _reason("dtype", sender.dtype, receiver.dtype)


def _architecture(model: LoadedModel) -> str:
    return f"{type(model.model).__name__} ({model.model.config.model_type})"


def _reason(name: str, ours: Any, theirs: Any, *, fatal: bool = True) -> Reason:
    if ours == theirs:
        return Reason(name, True, fatal, _text(theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        differing = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
        ours, theirs = ({k: side.get(k) for k in differing} for side in (ours, theirs))
    return Reason(name, False, fatal, f"sender {_text(ours)}, receiver {_text(theirs)}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    return str(value)


def _given(config: PretrainedConfig, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(config, name, None)) is not None}


def _rotary(config: PretrainedConfig) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or {}
    flat: dict[str, Any] = {}
    for key, value in parameters.items():
        # One set of parameters for each kind of layer, as in Gemma 3.
        flat.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value})
    if not parameters:
        flat = _given(config, _ROTARY_KEYS)
    return {key: value for key, value in sorted(flat.items()) if value is not None}


def _kinds(config: PretrainedConfig) -> dict[str, Any]:
    kinds = getattr(config, "layer_types", None) or []
    counted: dict[str, Any] = {
        f"layers of {kind}": [i for i, k in enumerate(kinds) if k == kind] for kind in sorted(set(kinds))
    }
    if len(counted) == 1:
        counted = dict.fromkeys(counted, "all")
    windowed = getattr(config, "use_sliding_window", True) and any("full" not in kind for kind in kinds or ["?"])
    window = _given(config, ("sliding_window", "attention_chunk_size")) if windowed else {}
    return counted | window or {"all layers": "full_attention"}


def _tokenizers(
    sender: LoadedModel, receiver: LoadedModel, sample_texts: Sequence[str], chat_template: bool
) -> Iterator[Reason]:
    ours, theirs = sender.tokenizer, receiver.tokenizer
    probes = [*PROBES, *sample_texts, *_special_probes(ours, theirs, chat_template)]
    differences = (_difference(ours, theirs, probe) for probe in probes)
    difference = next((d for d in differences if d), None)
    same = sender.fingerprint.tokenizer_sha256 == receiver.fingerprint.tokenizer_sha256
    agreed = f"same ids on {len(probes)} texts" + ("" if same else ", though the definitions are not identical")
    yield Reason("tokenizer", difference is None, True, difference or agreed)
    yield _vocabulary(ours.get_vocab(), theirs.get_vocab())
    yield _reason("added special tokens", _added(ours), _added(theirs), fatal=False)
    templates = sender.fingerprint.template_sha256, receiver.fingerprint.template_sha256
    detail = "same" if theirs.chat_template else "none"
    if templates[0] != templates[1]:
        detail = "differs; the receiver's is used for every arm" if theirs.chat_template else "the receiver has none"
    yield Reason("chat template", templates[0] == templates[1], False, detail)


def _special_probes(ours: Any, theirs: Any, chat_template: bool) -> Iterator[str]:
    shared = [token for token in theirs.all_special_tokens if token in set(ours.all_special_tokens)]
    if shared:
        yield "".join(f"a{token} b" for token in shared)
    if chat_template and theirs.chat_template:
        messages = [{"role": "user", "content": PROBES[0]}]
        yield theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _difference(ours: Any, theirs: Any, text: str) -> str | None:
    """Returns where the two tokenizers first cut a text differently, None if they agree."""
    first, second = (list(t(text, add_special_tokens=False)["input_ids"]) for t in (ours, theirs))
    if first == second:
        return None
    shared = zip(first, second, strict=False)
    at = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(first), len(second)))
    snippet = theirs.decode(second[max(0, at - 4) : at + 4]) or text[:40]
    sides = f"the sender has {_token(ours, first, at)}, the receiver {_token(theirs, second, at)}"
    return f'at token {at} in "{_shown(snippet)}" {sides}'


def _token(tokenizer: Any, ids: Sequence[int], at: int) -> str:
    return f'id {ids[at]} ("{_shown(tokenizer.decode([ids[at]]))}")' if at < len(ids) else "no more ids"


def _vocabulary(ours: dict[str, int], theirs: dict[str, int]) -> Reason:
    """Compares token → id. Tokens that one side lacks are only a remark: probes show whether texts have them."""
    moved = sorted(token for token in ours.keys() & theirs.keys() if ours[token] != theirs[token])
    if moved:
        example = min(moved, key=lambda token: theirs[token])
        detail = (
            f"{len(moved)} tokens have other ids, such as "
            f'"{_shown(example)}": sender {ours[example]}, receiver {theirs[example]}'
        )
        return Reason("vocabulary", False, True, detail)
    lone = [(side, sorted(a.keys() - b.keys(), key=a.__getitem__)) for side, a, b in _sides(ours, theirs)]
    found = [f'{len(names)} only in the {side}, such as "{_shown(names[0])}"' for side, names in lone if names]
    return Reason("vocabulary", not found, False, "; ".join(found) or f"{len(theirs)} tokens, same ids")


def _sides(ours: dict[str, int], theirs: dict[str, int]) -> list[tuple[str, dict[str, int], dict[str, int]]]:
    return [("sender", ours, theirs), ("receiver", theirs, ours)]


def _added(tokenizer: Any) -> str:
    """Returns the ids that a tokenizer puts around a plain text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = list(tokenizer("a")["input_ids"])
    start = next((i for i in range(len(ids)) if ids[i : i + len(bare)] == bare), 0)
    before, after = ids[:start], ids[start + len(bare) :]
    return f"before {before}, after {after}" if before or after else "none"


def _shown(text: str) -> str:
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return text if len(text) <= 40 else f"{text[:39]}…"
