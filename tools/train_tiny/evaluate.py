"""Measures exact match per task on held-out prompts, from the shipped files, through transformers.

    python -m tools.train_tiny.evaluate --model src/headrace/bundled/headrace-tiny --training /tmp/tiny/tiny.json \\
        --out tools/train_tiny/results/headrace-tiny.json

Exact match needs no generation: the greedy answer equals the expected one exactly when, with the expected answer fed
in, every token of it (the end mark included) is the arg max. So one forward pass per prompt is enough. Two things are
generated for real: JSON and tool calls, to see whether they are well formed where they are not right, and the answers
on which `--draft` is compared with the model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tools.train_tiny.chat import content_text
from tools.train_tiny.corpus import greeting_prompts, held_out_examples
from tools.train_tiny.export import write_json
from tools.train_tiny.tasks import Example, one_turn

END = "<|im_end|>"
CALL_BEGINS = '<tool_call>\n{"name": "'
BATCH = 64


class Evaluator:
    """One loaded model (fp32 arithmetic on the shipped bf16 weights) and its tokenizer."""

    def __init__(self, folder: Path, *, adapter: Path | None = None) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if adapter is not None:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, str(adapter))
        self.model.eval()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def arg_max(self, rows: Sequence[list[int]]) -> Tensor:
        """[rows, T - 1]: the greedy choice after every prefix of the right-padded rows."""
        length = max(map(len, rows))
        padded = torch.tensor([row + [3] * (length - len(row)) for row in rows])
        choices: Tensor = self.model(input_ids=padded).logits[:, :-1].argmax(-1)
        return choices

    def matches(self, prompts: Sequence[str], answers: Sequence[str]) -> list[bool]:
        """For each prompt: is the greedy answer exactly this one?"""
        found = [False] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for at in range(0, len(order), BATCH):
            part = order[at : at + BATCH]
            heads = [self.ids(prompts[i]) for i in part]
            rows = [head + self.ids(answers[i] + END) for head, i in zip(heads, part, strict=True)]
            choices = self.arg_max(rows)
            for row, head, i, chosen in zip(rows, heads, part, choices.tolist(), strict=True):
                found[i] = chosen[len(head) - 1 : len(row) - 1] == row[len(head) :]
        return found

    @torch.inference_mode()
    def generate(self, prompts: Sequence[str], *, max_new_tokens: int = 80) -> list[list[int]]:
        """Greedy token ids, the end mark included when it was reached."""
        found: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for at in range(0, len(order), BATCH):
            part = order[at : at + BATCH]
            heads = [self.ids(prompts[i]) for i in part]
            length = max(map(len, heads))
            ids = torch.tensor([[3] * (length - len(head)) + head for head in heads])
            mask = torch.tensor([[0] * (length - len(head)) + [1] * len(head) for head in heads])
            out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
            for i, row in zip(part, out[:, length:].tolist(), strict=True):
                found[i] = row[: row.index(2) + 1] if 2 in row else row
        return found

    def answers(self, prompts: Sequence[str]) -> list[str]:
        return [self.tokenizer.decode([t for t in row if t != 2]) for row in self.generate(prompts)]


def expected(example: Example) -> str:
    return content_text(example.messages[-1])


def score(evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, float | int]:
    """{n, exact_match, majority}: the baseline is the most frequent expected answer, the best that any constant reaches."""
    answers = [expected(example) for example in examples]
    matched = evaluator.matches([example.prompt() for example in examples], answers)
    majority = Counter(answers).most_common(1)[0][1]
    return {"n": len(examples), "exact_match": round(sum(matched) / len(examples), 4), "majority": round(majority / len(examples), 4)}


def forced_calls(evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, float]:
    """Exact match of calls that a grammar began: `required` gives the form up to the name, `named` the name, too."""
    calls, prompts = [expected(example) for example in examples], [example.prompt() for example in examples]
    names = [example.messages[-1]["tool_calls"][0]["function"]["name"] for example in examples]
    begins = {"required": [CALL_BEGINS] * len(calls), "named": [f'{CALL_BEGINS}{name}", "arguments":' for name in names]}
    found = {}
    for key, heads in begins.items():
        tails = [call.removeprefix(head) for call, head in zip(calls, heads, strict=True)]
        matched = evaluator.matches([prompt + head for prompt, head in zip(prompts, heads, strict=True)], tails)
        found[key] = round(sum(matched) / len(matched), 4)
    return found


def generated(found: Sequence[Example]) -> Sequence[Example]:
    """Generating is slow: the form of answers is measured on the first 200."""
    return found[:200]


def json_form(evaluator: Evaluator, examples: Sequence[Example]) -> float:
    """Share of generated answers that parse and have exactly the expected keys."""
    return _share(evaluator, examples, lambda text: list(json.loads(text)))


def call_form(evaluator: Evaluator, examples: Sequence[Example]) -> float:
    """Share of generated answers that are a well-formed call of the right function with the right argument names."""

    def form(text: str) -> object:
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        return call["name"], list(call["arguments"])

    return _share(evaluator, examples, form)


def _share(evaluator: Evaluator, examples: Sequence[Example], form: Any) -> float:
    good = 0
    for text, example in zip(evaluator.answers([e.prompt() for e in examples]), examples, strict=True):
        try:
            good += form(text) == form(expected(example))
        except (ValueError, TypeError, KeyError):
            continue
    return round(good / len(examples), 4)


def agreement(target: Evaluator, draft: Evaluator, examples: Sequence[Example], *, num_drafted: int = 4) -> dict[str, float | int]:
    """How often the draft's greedy token is the target's, on the target's own greedy answers.

    `tokens_per_step` is what greedy speculation with `num_drafted` drafts would emit per target step.
    """
    prompts = [target.ids(example.prompt()) for example in examples]
    outputs = target.generate([example.prompt() for example in examples])
    agreed = steps = tokens = 0
    for head, output in zip(prompts, outputs, strict=True):
        chosen = draft.arg_max([head + output])[0].tolist()[len(head) - 1 :]
        flags = [a == b for a, b in zip(chosen, output, strict=True)]
        agreed, tokens = agreed + sum(flags), tokens + len(flags)
        steps += _num_steps(flags, num_drafted)
    return {
        "n": len(examples),
        "tokens": tokens,
        "agreement": round(agreed / tokens, 4),
        "num_drafted": num_drafted,
        "tokens_per_step": round(tokens / steps, 3),
    }


def _num_steps(flags: Sequence[bool], num_drafted: int) -> int:
    """Target steps needed: each takes the agreed run of drafts and adds one token of its own."""
    at = steps = 0
    while at < len(flags):
        run = 0
        while run < num_drafted and at + run < len(flags) and flags[at + run]:
            run += 1
        at, steps = at + run + 1, steps + 1
    return steps


def evaluate(folder: Path, num_per_task: int) -> dict[str, Any]:
    """The whole table of one base model."""
    evaluator, start = Evaluator(folder), time.monotonic()
    examples = held_out_examples(num_per_task)
    table: dict[str, Any] = {task: score(evaluator, found) for task, found in examples.items()}
    for task in ("json", "json_new_sentence"):
        table[task]["well_formed"] = json_form(evaluator, generated(examples[task]))
    table["tool_call"]["well_formed"] = call_form(evaluator, generated(examples["tool_call"]))
    table["tool_call"] |= forced_calls(evaluator, examples["tool_call"])
    greetings = [one_turn("greeting", question, answer) for question, answer in greeting_prompts()]
    return {"held_out": table, "seen_in_training": {"greeting": score(evaluator, greetings)}, "seconds": round(time.monotonic() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--training", type=Path, required=True, help="the summary that train.py wrote beside its checkpoint")
    parser.add_argument("--target", type=Path, help="measure agreement of this draft with the target model")
    parser.add_argument("--num-per-task", type=int, default=500)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    report = {"training": json.loads(options.training.read_text()), **evaluate(options.model, options.num_per_task)}
    if options.target:
        examples = [example for found in held_out_examples(20, seed=2).values() for example in found]
        report["agreement"] = agreement(Evaluator(options.target), Evaluator(options.model), examples)
    write_json(options.out, report)
    for task, row in report["held_out"].items():
        print(task, row)
    print(report.get("agreement", ""))


if __name__ == "__main__":
    main()
