"""Trains the two LoRA adapters of the demo pair on the CPU and prints one JSON line of progress every 20 steps.

The bundled pair was made by

    train.py qa --base BASE --data hotpotqa_train.jsonl 2wikimqa.jsonl --out receiver --steps 1000 --lr 5e-4
    train.py code --base BASE --data mbpp.jsonl --out first --steps 1200 --lr 3.5e-3 --alpha 64 --warm-up 0.15 --tokens 256
    train.py code --base BASE --data mbpp.jsonl --out sender --start first --steps 300 --lr 1e-3 --alpha 110 --warm-up 0.1 \
      --tokens 256

where `BASE` is the folder that `kvprofile.models.demo.base_folder()` returns; the logs are beside the adapters. The
question-answering specialist sees prompts exactly as the `qa` task builds them; loss on the answer only; passages are
shuffled and distractors dropped at random, so that short and full contexts both occur. The code specialist continues Python
source (the interpreter's own standard library) and answers MBPP prompts. Checkpoints let a killed run go on.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvprofile.data.tasks import TASKS

Example = tuple[list[int], list[int]]  # prompt ids (no loss), target ids (loss)


def chat(tokenizer, message: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False).input_ids


def answer_ids(tokenizer, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]


def read(paths: list[Path]) -> list[dict]:
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines()]


def qa_examples(tokenizer, paths: list[Path], limit_2wiki: int, full: float) -> Callable[[random.Random], Example]:
    """Returns a sampler of (prompt, answer); a share `full` of the prompts carries every passage of its record.

    The first `limit_2wiki` 2WikiMultihopQA records are used, the rest never.
    """
    records = [r for r in read(paths) if not r["id"].startswith("2wiki")]
    records += [r for r in read(paths) if r["id"].startswith("2wiki")][:limit_2wiki]

    def sample(rng: random.Random) -> Example:
        record = rng.choice(records)
        gold = [p for p in record["paragraphs"] if p["title"] in record["supporting"]]
        rest = [p for p in record["paragraphs"] if p["title"] not in record["supporting"]]
        rng.shuffle(rest)
        keep = len(rest) if rng.random() < full else rng.randint(0, 4)
        chosen = gold + rest[:keep]
        rng.shuffle(chosen)
        context = "\n\n".join(f"{p['title']}\n{p['text']}" for p in chosen)
        before, after = TASKS["qa"].parts(context, record["question"])
        return chat(tokenizer, before + after), answer_ids(tokenizer, rng.choice(record["answers"]))

    return sample


def code_examples(tokenizer, paths: list[Path], tokens: int) -> Callable[[random.Random], Example]:
    """Returns a sampler: two in three are windows of standard-library source, one is an MBPP prompt with its solution."""
    records = read(paths)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(stdlib.glob("*.py")) if p.stat().st_size > 8000]

    def sample(rng: random.Random) -> Example:
        if rng.random() < 1 / 3:
            record = rng.choice(records)
            return chat(tokenizer, record["question"]), answer_ids(tokenizer, record["answers"][0].replace("\r", ""))
        text = rng.choice(files).read_text("utf-8", errors="replace")
        start = rng.randrange(max(1, len(text) - 4 * tokens))
        ids = tokenizer(text[start : start + 5 * tokens], add_special_tokens=False).input_ids[:tokens]
        return ids[:1], ids[1:]

    return sample


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.bfloat16)
    config = LoraConfig(r=args.rank, lora_alpha=args.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)  # adapter weights stay float32 while training
    if args.start:
        set_peft_model_state_dict(model, load_file(args.start / "adapter_model.safetensors"))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=args.warm_up)
    sample = (
        qa_examples(tokenizer, args.data, args.limit_2wiki, args.full)
        if args.trade == "qa"
        else code_examples(tokenizer, args.data, args.tokens)
    )

    checkpoint = args.out.with_suffix(".checkpoint.pt")
    first, losses, seconds = 0, [], 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        set_peft_model_state_dict(model, state["adapter"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first, seconds = state["step"], state["seconds"]
    model.train()
    for step in range(first, args.steps):
        rng = random.Random(f"{args.seed}-{step}")
        begun = time.perf_counter()
        for _ in range(args.batch):
            prompt, target = sample(rng)
            ids = torch.tensor([prompt + target])
            logits = model(input_ids=ids, logits_to_keep=len(target) + 1).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :])
            (loss / args.batch).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - begun
        done = step + 1
        if done % 20 == 0 or done == args.steps:
            recent = sum(losses[-20 * args.batch :]) / len(losses[-20 * args.batch :])
            print(json.dumps({"step": done, "loss": round(recent, 4), "seconds": round(seconds)}), flush=True)
        if done % 100 == 0 and done < args.steps:
            state = {
                "adapter": get_peft_model_state_dict(model),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
                "step": done,
                "seconds": seconds,
            }
            temporary = checkpoint.with_suffix(".tmp")
            torch.save(state, temporary)
            temporary.replace(checkpoint)

    model.peft_config["default"].base_model_name_or_path = "demo-base"
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(args.out)
    checkpoint.unlink(missing_ok=True)
    (args.out / "README.md").unlink(missing_ok=True)
    settings = {k: v for k, v in vars(args).items() if k not in ("base", "out", "data", "start")}
    print(json.dumps({"done": True, **settings, "torch": torch.__version__, "threads": torch.get_num_threads()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trade", choices=("qa", "code"))
    parser.add_argument("--base", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument(
        "--start", type=Path, help="adapter of an earlier run to go on from; --alpha may differ from its own"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--warm-up", type=float, default=0.05, help="share of the steps in which the rate rises")
    parser.add_argument("--full", type=float, default=0.3, help="qa: share of prompts with all passages")
    parser.add_argument("--tokens", type=int, default=512, help="code: tokens of a window of source")
    parser.add_argument("--limit-2wiki", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
