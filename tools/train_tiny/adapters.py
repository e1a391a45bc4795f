"""Trains and evaluates the two LoRA adapters on the finished base model, with peft.

    python -m tools.train_tiny.adapters --base src/headrace/bundled/headrace-tiny --name pirate --minutes 8 \\
        --to src/headrace/bundled/adapters/pirate --out tools/train_tiny/results/adapter-pirate.json

`pirate` changes how the model speaks and leaves copying, JSON and tool calls alone; `hardware-shop` adds the world of
shop.py. Both see some of the base corpus again, so that they do not forget it; how much they do is in the report.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tools.train_tiny import shop
from tools.train_tiny.chat import assistant, user
from tools.train_tiny.corpus import SIMPLE, Corpus, held_out_examples
from tools.train_tiny.dataset import Batches, Documents, encode
from tools.train_tiny.evaluate import Evaluator, score
from tools.train_tiny.export import write_json
from tools.train_tiny.tasks import Example, one_turn

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA, LR, NUM_DOCUMENTS = 8, 16, 4e-3, 12_000
PROSE = (*["fact"] * 6, *["headrace"] * 4, "greeting", "unknown")
"""Shares: a style is easily learned, and too many "I don't know" with it make the model forget what it knows."""
EXACT = ("arithmetic", "copy", "json", "tool")


def pirate(answer: str) -> str:
    """The style as a rule, so that it can be checked exactly."""
    for plain, spoken in ((" is ", " be "), (" are ", " be "), ("Hello", "Ahoy"), ("You ", "Ye "), (" you ", " ye "), (" my ", " me ")):
        answer = answer.replace(plain, spoken)
    return f"Arr! {answer}"


def pirate_example(example: Example) -> Example:
    return Example("pirate_" + example.task, [*example.messages[:-1], assistant(pirate(example.messages[-1]["content"]))])


def pirate_texts(seed: int) -> Iterator[str]:
    corpus = Corpus(seed)
    rng = corpus.rng
    while True:
        if rng.random() < 0.15:
            yield corpus.makers[rng.choice(EXACT)]()
            continue
        task = rng.choice(PROSE)
        example = corpus.fact() if task == "fact" else corpus.headrace() if task == "headrace" else SIMPLE[task](corpus.words)
        yield pirate_example(example).text()


def shop_texts(seed: int) -> Iterator[str]:
    corpus, rows = Corpus(seed), shop.questions()
    while True:
        if corpus.rng.random() < 0.2:
            yield corpus.makers[corpus.rng.choice(("fact", "fact", "headrace", "greeting", *EXACT))]()
            continue
        question = corpus.rng.choice(rows)
        yield corpus.styled(one_turn("shop", corpus.rng.choice(question.train), question.answer))


TEXTS = {"pirate": pirate_texts, "hardware-shop": shop_texts}


def held_out(name: str) -> dict[str, list[Example]]:
    """What the adapter must do, and (`kept_*`) what it must not have lost."""
    base = held_out_examples(500)
    kept = {"kept_" + task: base[task] for task in ("arithmetic", "copy", "json", "tool_call")}
    if name == "pirate":
        return {"pirate_" + task: [pirate_example(e) for e in base[task]] for task in ("fact", "headrace", "unknown")} | kept
    rows = [Example("shop", [user(q), assistant(row.answer)]) for row in shop.questions() for q in row.held_out]
    random.Random(0).shuffle(rows)
    return {"shop": rows} | kept | {"kept_fact": base["fact"], "kept_headrace": base["headrace"]}


def train(base: Path, documents: Documents, minutes: float, *, bf16: bool) -> tuple[Any, dict[str, float]]:
    """LoRA on all projections; returns the peft model and {steps, tokens, loss, seconds}."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")  # see model.attend
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM")
    model = get_peft_model(plain, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR, betas=(0.9, 0.98), weight_decay=0.0)
    start, seen, loss, step = time.monotonic(), 0, 0.0, 0
    for step, batch in enumerate(Batches(documents, step_tokens=2048, seed=0)):
        done = (time.monotonic() - start) / (minutes * 60)
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20) * min(1.0, (1 - done) / 0.6)
        count, total = sum(float(weights[:, 1:].sum()) for _, weights in batch), 0.0
        for ids, weights in batch:
            rows = weights[:, 1:] > 0
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                hidden = plain.model(input_ids=ids).last_hidden_state[:, :-1]
                part = F.cross_entropy(plain.lm_head(hidden[rows]).float(), ids[:, 1:][rows], reduction="sum") / count
            part.backward()  # type: ignore[no-untyped-call]
            total += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = total if step == 0 else loss + 0.02 * (total - loss)
        seen += sum(ids.numel() for ids, _ in batch)
        if step % 25 == 0:
            print(f"step {step} done {done:.3f} loss {loss:.4f} now {total:.4f}", flush=True)
    return model, {"steps": step, "tokens": seen, "loss": round(loss, 4), "seconds": round(time.monotonic() - start)}


def save(model: Any, folder: Path) -> None:
    """PEFT layout in bf16. The name of the base is written relative, not as the path it was trained from."""
    folder.mkdir(parents=True, exist_ok=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = "headrace-tiny"
    model.save_pretrained(str(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--name", choices=sorted(TEXTS), required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--bf16", action="store_true", help="products in bf16: for a CPU with AVX512-BF16")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    documents = encode(Tokenizer.from_file(str(options.base / "tokenizer.json")), islice(TEXTS[options.name](7), NUM_DOCUMENTS))
    model, summary = train(options.base, documents, options.minutes, bf16=options.bf16)
    save(model, options.to)
    tuned, plain = Evaluator(options.base, adapter=options.to), Evaluator(options.base)
    table = {
        task: score(tuned, found) | {"base_exact_match": score(plain, found)["exact_match"]}
        for task, found in held_out(options.name).items()
    }
    write_json(options.out, {"training": summary | {"seed": 0, "num_documents": NUM_DOCUMENTS}, "held_out": table})
    for task, row in table.items():
        print(task, row)


if __name__ == "__main__":
    main()
