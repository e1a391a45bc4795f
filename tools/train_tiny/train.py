"""Trains one of the two bundled models from nothing.

    python -m tools.train_tiny.train --model tiny --minutes 60 --out /tmp/tiny

The schedule is a plateau and a linear decay over the last 80 percent, driven by the clock (`--minutes`) or, to repeat
a run exactly, by a number of steps (`--steps`). Checkpoints are fp32 safetensors; `export.py` makes the shipped files.
Exit status 1 when the smoothed training loss ends above `--max-loss`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.train_tiny.corpus import MIXES, Corpus
from tools.train_tiny.dataset import Batches, Documents, encode
from tools.train_tiny.induction import WiredHeads, prewire
from tools.train_tiny.model import DRAFT, TINY, TinyConfig, TinyLlama, num_parameters
from tools.train_tiny.muon import Muon
from tools.train_tiny.pieces import SharedPieces
from tools.train_tiny.tasks import copy
from tools.train_tiny.tokenizer import letter_pieces, train_tokenizer
from tools.train_tiny.words import Words

CONFIGS: dict[str, TinyConfig] = {"tiny": TINY, "draft": DRAFT}
MUON_LR, ADAM_LR = 0.02, 2e-3
WARMUP_STEPS, DECAY_SHARE = 30, 0.9
TOKENIZER_TEXTS = 40_000


@dataclass(frozen=True, slots=True)
class Options:
    """What one run was asked to do; written beside its checkpoint."""

    model: str
    out: str
    seed: int
    num_documents: int
    step_tokens: int
    minutes: float
    steps: int
    max_loss: float
    init: str
    workers: int
    row_tokens: int
    device: str
    mix: str
    lr_scale: float
    hold_share: float
    bf16: bool


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="tiny")
    parser.add_argument("--out", required=True, help="folder for checkpoints, tokenizer and log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-documents", type=int, default=320_000)
    parser.add_argument("--step-tokens", type=int, default=3072)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=0, help="end after this many steps instead of after --minutes")
    parser.add_argument("--max-loss", type=float, default=1.0)
    parser.add_argument("--init", default="", help="continue from this checkpoint (weights only)")
    parser.add_argument("--workers", type=int, default=2, help="micro-batches computed at once, one core each")
    parser.add_argument("--row-tokens", type=int, default=1024, help="tokens of a micro-batch; larger on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mix", choices=sorted(MIXES), default="all")
    parser.add_argument("--lr-scale", type=float, default=1.0, help="for a later leg")
    parser.add_argument(
        "--hold-share", type=float, default=0.5, help="share of a run from nothing during which the wired heads stay as written"
    )
    parser.add_argument("--bf16", action="store_true", help="products in bf16: for a CPU with AVX512-BF16 or a GPU")
    return Options(**vars(parser.parse_args()))


def prepare(options: Options) -> tuple[Tokenizer, Documents]:
    """The tokenizer (made once per folder) and the encoded corpus of this seed."""
    path = Path(options.out) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.exists() else new_tokenizer(CONFIGS[options.model])
    tokenizer.save(str(path))
    cache = Path(options.out) / f"documents-{options.mix}-{options.seed}-{options.num_documents}.npz"
    if not cache.exists():
        corpus = Corpus(options.seed + 1, letter_pieces(tokenizer))
        encode(tokenizer, islice(corpus.texts(options.mix), options.num_documents)).save(cache)
    return tokenizer, Documents.load(cache)


def new_tokenizer(config: TinyConfig) -> Tokenizer:
    """Made from the first texts of stream 0, so that it is a function of the corpus alone."""
    return train_tokenizer(islice(Corpus(0).texts(), TOKENIZER_TEXTS), vocab_size=config.vocab_size)


def lr_scale(step: int, progress: float) -> float:
    """Warm up, stay, then fall linearly to nothing."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (1.0 - progress) / DECAY_SHARE)


def progress_of(options: Options) -> Callable[[int], float]:
    """Share of the run that is done, as a function of the step."""
    if options.steps:
        return lambda step: step / options.steps
    start = time.monotonic()
    return lambda step: (time.monotonic() - start) / (options.minutes * 60)


def train(options: Options, tokenizer: Tokenizer, documents: Documents) -> tuple[TinyLlama, dict[str, float]]:
    """Run the loop; returns the model and {steps, tokens, supervised_tokens, loss, seconds}."""
    torch.manual_seed(options.seed)
    model = TinyLlama(CONFIGS[options.model]).to(options.device)
    if options.init:
        model.load_state_dict(load_file(options.init))
    else:
        prewire(model)
    wired = None if options.init else WiredHeads(model)
    pieces = SharedPieces(model.embed.weight, tokenizer, np.bincount(documents.ids, minlength=tokenizer.get_vocab_size()))
    probe = CopyProbe(tokenizer)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "embed.weight"]
    rest = [p for name, p in model.named_parameters() if p.ndim == 1 or name == "embed.weight"]
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    muon, adam = Muon(matrices, dtype=dtype), torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0)
    pool = ThreadPoolExecutor(options.workers)
    progress, start, saved = progress_of(options), time.monotonic(), time.monotonic()
    seen, supervised, loss, step = 0, 0, 0.0, 0
    order = options.seed + bool(options.init)  # a second leg reads in another order
    for step, batch in enumerate(Batches(documents, step_tokens=options.step_tokens, row_tokens=options.row_tokens, seed=order)):
        done = progress(step)
        if done >= 1:
            break
        count = sum(float(weights[:, 1:].sum()) for _, weights in batch)
        total = sum(pool.map(partial(backward, model, count, options.bf16), batch))
        scale = options.lr_scale * lr_scale(step, done)
        for group in adam.param_groups:
            group["lr"] = ADAM_LR * scale
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        adam.step()
        pieces.hold()
        muon.step(MUON_LR * scale, pool)
        if wired is not None and done < options.hold_share:
            wired.hold()
        model.zero_grad(set_to_none=True)
        loss = total if step == 0 else loss + 0.02 * (total - loss)
        seen, supervised = seen + sum(ids.numel() for ids, _ in batch), supervised + int(count)
        if step % 100 == 0:
            rate, copied = seen / (time.monotonic() - start), probe(model)
            print(f"step {step} done {done:.3f} loss {loss:.4f} now {total:.4f} copied {copied:.3f} tok/s {rate:.0f}", flush=True)
        if time.monotonic() - saved > 180:
            saved = time.monotonic()
            save(model, options, measured(step, seen, supervised, loss, start))
    return model, measured(step, seen, supervised, loss, start)


def measured(steps: int, tokens: int, supervised: int, loss: float, start: float) -> dict[str, float]:
    return {
        "steps": steps,
        "tokens": tokens,
        "supervised_tokens": supervised,
        "loss": round(loss, 4),
        "seconds": round(time.monotonic() - start),
    }


def backward(model: TinyLlama, count: float, bf16: bool, rows: tuple[Tensor, Tensor]) -> float:
    """Add one micro-batch's gradients to the model's; autograd locks the sum, so two threads may do this at once."""
    device = model.embed.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):  # a cache would be shared by the threads
        part = model.loss_sum(rows[0].to(device), rows[1].to(device)) / count
    part.backward()  # type: ignore[no-untyped-call]
    return part.item()


class CopyProbe:
    """How well the copying circuit works: share of held-out copy prompts answered exactly (teacher forced, so one pass)."""

    def __init__(self, tokenizer: Tokenizer, *, num_prompts: int = 128) -> None:
        words = Words(random.Random(5), held_out=True)
        documents = encode(tokenizer, (copy(words).text() for _ in range(num_prompts)))
        lengths = documents.lengths()
        self._ids = torch.full((len(lengths), int(lengths.max())), 3)
        self._asked = torch.zeros(self._ids.shape, dtype=torch.bool)
        for row, (low, size) in enumerate(zip(documents.offsets, lengths, strict=False)):
            self._ids[row, :size] = torch.from_numpy(documents.ids[low : low + size].astype(np.int64))
            self._asked[row, :size] = torch.from_numpy(documents.supervised[low : low + size])

    @torch.no_grad()
    def __call__(self, model: TinyLlama) -> float:
        ids = self._ids.to(model.embed.weight.device)
        right = (model.hidden(ids)[:, :-1] @ model.embed.weight.T).argmax(-1) == ids[:, 1:]
        return (right.cpu() | ~self._asked[:, 1:]).all(dim=1).float().mean().item()


def save(model: TinyLlama, options: Options, figures: dict[str, float]) -> dict[str, Any]:
    """Write the checkpoint and, beside it, the summary that is returned: `figures`, what was asked, and the legs before."""
    folder = Path(options.out)
    summary: dict[str, Any] = figures | {
        "seed": options.seed,
        "num_documents": options.num_documents,
        "step_tokens": options.step_tokens,
        "mix": options.mix,
    }
    if options.init:
        summary["earlier_leg"] = json.loads(Path(options.init).with_suffix(".json").read_text())
    save_file({name: p.detach().cpu().clone() for name, p in model.named_parameters()}, folder / f"{options.model}.safetensors.new")
    (folder / f"{options.model}.safetensors.new").replace(folder / f"{options.model}.safetensors")
    (folder / f"{options.model}.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def main() -> int:
    options = parse()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # one micro-batch per core: threads inside an operation would wait for each other on a shared machine
    tokenizer, documents = prepare(options)
    config = CONFIGS[options.model]
    print(f"{num_parameters(config)} parameters, {len(documents.offsets) - 1} documents, {len(documents.ids)} tokens", flush=True)
    model, figures = train(options, tokenizer, documents)
    summary = save(model, options, figures)
    print(json.dumps(summary))
    return 0 if summary["loss"] <= options.max_loss else 1


if __name__ == "__main__":
    raise SystemExit(main())
