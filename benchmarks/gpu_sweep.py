"""Times a sweep of one long context on a GPU: random weights of an 8B Llama's shape, all groups of 1-, 2- and 3-layer units.

    python benchmarks/gpu_sweep.py > benchmarks/results/gpu_sweep.json
    python benchmarks/gpu_sweep.py --tiny      # the same on a tiny model and the CPU, to try the script

Both models have random weights, so times mean something and answers do not: with bfloat16 rounding many plans part from the
reference executor, and how many is reported. One at a time is a seeded sample of plans, extrapolated. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch
import transformers

from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.engine.executor import Question, Readers, answer_plans
from kvprofile.engine.reference import greedy, partial_prefill
from kvprofile.layers import Plan, grid_union
from kvprofile.strategies import load_all

LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
TINY = {**LLAMA_8B, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--compared", type=int, default=24)
    options = parser.parse_args()

    device, dtype = ("cpu", torch.float32) if options.tiny else ("cuda", torch.bfloat16)
    config = transformers.LlamaConfig(**(TINY if options.tiny else LLAMA_8B))
    readers = Readers(*(_random_model(config, seed, device, dtype) for seed in (1, 2)))
    ids = torch.randint(
        3, config.vocab_size, (options.tokens + 64,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    question = Question(tuple(ids[options.tokens :]), options.answer, Ending())
    cases = [_case(readers, ids[: options.tokens], question, units, options.compared) for units in ((1,), (2,), (3,))]
    name = "cpu" if options.tiny else torch.cuda.get_device_name()
    shared = {
        "device": name,
        "dtype": str(dtype),
        "torch": torch.__version__,
        "shares_contexts": readers.receiver.shares_contexts,
    }
    print(json.dumps({**shared, "context_tokens": options.tokens, "answer_tokens": options.answer, "cases": cases}))


def _random_model(config: transformers.LlamaConfig, seed: int, device: str, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype)
    return Decoder(model.eval())


def _case(
    readers: Readers, context: list[int], question: Question, units: tuple[int, ...], compared: int
) -> dict[str, object]:
    plans = [Plan("layer_group", group) for group in grid_union(len(readers.receiver.layers), units)]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    caches = ContextCaches(*readers, context, 8)
    _ = caches.sender_capture
    list(answer_plans(readers, caches, question, plans[:8], load_all()))  # warm-up
    begun = _now()
    answers = {a.plan: a.token_ids for a in answer_plans(readers, caches, question, plans, load_all())}
    engine = _now() - begun
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    chosen = random.Random(0).sample(plans, min(compared, len(plans)))
    begun, parted = _now(), 0
    for plan in chosen:
        assert plan.range
        alone = greedy(
            readers.receiver, partial_prefill(readers.receiver, caches.sender_capture, plan.range), *question
        )
        parted += alone != answers[plan]
    reference = (_now() - begun) / len(chosen) * len(plans)
    return {
        "granularity": units,
        "groups": len(plans),
        "engine_seconds": engine,
        "reference_seconds_extrapolated": reference,
        "times_faster": reference / engine,
        "plans_compared": len(chosen),
        "plans_that_parted": parted,
        "peak_bytes": peak,
    }


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
