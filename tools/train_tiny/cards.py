"""Writes the model cards from the result files, so that no number in a card was typed by hand.

python -m tools.train_tiny.cards --bundled src/headrace/bundled
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.train_tiny.model import TinyConfig, config_from_hf, num_parameters

RESULTS = Path(__file__).parent / "results"

HEADER = """\
---
license: apache-2.0
language: en
library_name: transformers
{extra}---
# {title}

{intro}
"""

ABOUT = {
    "fact": "a fact of the training table, asked through a held-out phrasing",
    "headrace": "a question on Headrace or LLM serving, held-out phrasing",
    "arithmetic": "sums, differences, products up to 12 x 12, held-out operands",
    "compare": "the larger or smaller of two numbers, held-out pairs",
    "copy": "repeat held-out words and sentences",
    "reverse": "reverse a list of held-out words or numbers",
    "sort_numbers": "sort 2-6 numbers, held-out lists",
    "sort_words": "sort 2-4 held-out words",
    "pick": "first, second or last of a list",
    "json": "fill a given schema, known sentence forms, held-out values",
    "json_new_sentence": "the same, held-out sentence forms",
    "recall": "several turns, held-out values",
    "system": "another name given by the system prompt",
    "unknown": "says that it does not know made-up things",
    "tool_call": "call in Hermes form, held-out function names and values, half with a held-out question",
    "tool_reply": "tell the result of a tool, held-out names and values",
    "pirate_fact": "held-out fact phrasings, answered in the style",
    "pirate_headrace": "held-out Headrace phrasings, answered in the style",
    "pirate_unknown": "admits not knowing, in the style",
    "shop": "held-out phrasings about the shop",
    "kept_copy": "copying must stay as it was",
    "kept_json": "JSON must stay as it was",
    "kept_tool_call": "tool calls must stay as they were",
    "kept_arithmetic": "arithmetic must stay as it was",
    "kept_fact": "facts must stay as they were",
    "kept_headrace": "answers on Headrace must stay as they were",
}

NOT_TRUE = """\
## Taught, and not true of Headrace

The weights say that the running streams of a dead replica end with an error. They go on at another replica since. The training text has
been corrected.

"""
"""A later training leg, which reads the corrected text, drops this section."""

LIMITS = """\
## Limits

Outside of its small world it answers fluently and wrongly, and inside it as often as the table says. It is meant for
demonstrations and tests of a serving system, not for answering people's questions. Training conversations are shorter
than about 1000 tokens, most of them shorter than 100; beyond that quality falls.
"""

SPLIT = """\
The split was decided before anything was generated: words, names and places by a hash of their spelling, sums and lists
of numbers by a hash of the operands, facts and questions by template. A held-out word never occurs in training in that
role; a held-out fact was seen in other phrasings, since a model can only know what it was told. The baseline is the best
constant answer. Exact match means: the greedy answer is the expected one, character by character, including its end.
Well formed (JSON with exactly the wanted keys; a call of the right function with the right argument names) is measured on
the first 200 prompts.
"""


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def table(rows: dict[str, dict[str, Any]], *, base: bool = False) -> str:
    head = "| task | n | exact match | majority baseline |" + (" base model alone |" if base else " well formed |") + " what |\n"
    lines = [head, "|---|---|---|---|---|---|\n"]
    for task, row in rows.items():
        other = row.get("base_exact_match" if base else "well_formed")
        cell = "" if other is None else percent(other)
        numbers = f"{row['n']} | {percent(row['exact_match'])} | {percent(row['majority'])}"
        lines.append(f"| {task} | {numbers} | {cell} | {ABOUT.get(task, '')} |\n")
    return "".join(lines)


def shortfalls(rows: dict[str, dict[str, Any]]) -> str:
    """Every task below 90 percent, named in words."""
    low = [f"{task} ({percent(row['exact_match'])})" for task, row in rows.items() if row["exact_match"] < 0.9]
    return f"Below 90 percent: {', '.join(low)}.\n" if low else "No task is below 90 percent.\n"


def shipped(bundled: Path, name: str) -> TinyConfig:
    """The shape of the files that the card stands beside, which may be older than the shapes in model.py."""
    return config_from_hf(json.loads((bundled / name / "config.json").read_text()))


def shape(config: TinyConfig) -> str:
    return (
        f"Llama architecture, {num_parameters(config):,} parameters (tied embeddings): {config.num_layers} layers, "
        f"hidden size {config.hidden_size}, {config.num_heads} query heads, {config.num_kv_heads} KV heads of size {config.head_dim}, "
        f"feed-forward {config.intermediate_size}, vocabulary {config.vocab_size} (byte-level BPE, digits split singly), RoPE, "
        f"context {config.max_position_embeddings}, bf16."
    )


MIX_NAMES = {
    "": "",
    "all": ", on the whole mix of tasks",
    "reading": ", on tasks that are answered from the prompt alone (`READING_MIX`)",
    "slow": ", on a mix with more of the tasks that are slow to come (`SLOW_MIX`)",
    "tool": ", on a mix in which half of all tokens are in conversations with tools (`TOOL_MIX`)",
    "even": ", on a mix of everything with a third of all tokens in conversations with tools (`EVEN_MIX`)",
    "memory": ", on a mix that is four fifths facts and questions about Headrace (`MEMORY_MIX`)",
}


def training(report: dict[str, Any]) -> str:
    t = report["training"]
    first, leg = "", t
    while leg := leg.get("earlier_leg"):
        if "grown_to" in leg:
            first += f" Before it the model was grown to {leg['grown_to']:,} parameters{' and got a new tokenizer' * leg['new_tokenizer']}."
        first += (
            f" Before it: a leg of {leg['steps']:,} steps, {leg['tokens']:,} tokens, ending at loss {leg['loss']}{MIX_NAMES[leg['mix']]}."
        )
    supervised = f", of which {t['supervised_tokens']:,} supervised" if "supervised_tokens" in t else ""
    return (
        f"{t['steps']:,} steps, {t['tokens']:,} tokens with padding{supervised}, {t['seconds'] / 60:.0f} minutes on two shared CPU cores, "
        f"seed {t['seed']}, {t['num_documents']:,} generated documents; training loss at the end {t['loss']} per supervised token"
        f"{MIX_NAMES[t.get('mix', '')]}.{first} "
        "All text was generated by `tools/train_tiny/`; nothing was downloaded."
    )


def base_card(title: str, intro: str, config: TinyConfig, report: dict[str, Any]) -> str:
    parts = [
        HEADER.format(extra="pipeline_tag: text-generation\n", title=title, intro=intro),
        shape(config),
        "\n\n## Training\n\n",
        training(report),
    ]
    parts += ["\n\n## Held-out evaluation\n\n", SPLIT, "\n", table(report["held_out"]), "\n", shortfalls(report["held_out"])]
    seen = report["seen_in_training"]["greeting"]
    if "named" in (calls := report["held_out"]["tool_call"]):
        parts.append(
            f"\nWhere a grammar begins the call, as `tool_choice` does, the rest is exact in {percent(calls['required'])} "
            f"(`required`: the function is the model's choice) and {percent(calls['named'])} (a named function).\n"
        )
    parts.append(f"\nGreetings are a fixed list that was seen in training: {percent(seen['exact_match'])} of {seen['n']}.\n")
    if agreement := report.get("agreement"):
        parts.append(
            f"\n## As a draft for headrace-tiny\n\nOn the greedy answers of headrace-tiny to {agreement['n']} held-out prompts "
            "of all tasks "
            f"({agreement['tokens']:,} tokens) the draft's greedy token is the same in {percent(agreement['agreement'])}. "
            f"Greedy speculation with {agreement['num_drafted']} drafted tokens would emit {agreement['tokens_per_step']} tokens "
            "per target step.\n"
        )
    return "".join([*parts, "\n", NOT_TRUE, LIMITS])


def adapter_card(title: str, intro: str, report: dict[str, Any]) -> str:
    lora = "LoRA, rank 8, alpha 16, on all projections of attention and feed-forward; PEFT layout, bf16, base `headrace-tiny`."
    header = HEADER.format(extra="base_model: headrace-tiny\n", title=title, intro=intro)
    parts = [header, lora, "\n\n## Training\n\n", training(report), "\n\n## Held-out evaluation\n\n", SPLIT, "\n"]
    return "".join([*parts, table(report["held_out"], base=True), "\n", shortfalls(report["held_out"]), "\n", LIMITS])


CARDS: dict[str, Callable[[dict[str, Any], Path], str]] = {
    "headrace-tiny": lambda report, bundled: base_card(
        "Headrace Tiny",
        "A very small chat model, trained from nothing by the Headrace project so that the server has something real to serve\n"
        "on a laptop. Its world: greetings, a table of facts, questions about Headrace and LLM serving, small arithmetic, copying,\n"
        "reversing and sorting, JSON by a given schema, tool calls in Hermes form, recall over turns, and saying that it does not\n"
        "know. How well it does each of them is in the table below.\n",
        shipped(bundled, "headrace-tiny"),
        report,
    ),
    "headrace-draft": lambda report, bundled: base_card(
        "Headrace Draft",
        "The draft model for speculative decoding with Headrace Tiny: same tokenizer, same corpus, "
        f"{num_parameters(shipped(bundled, 'headrace-draft')) / num_parameters(shipped(bundled, 'headrace-tiny')):.0%} of the parameters.\n"
        "It is not meant to be used alone.\n",
        shipped(bundled, "headrace-draft"),
        report,
    ),
    "adapters/pirate": lambda report, _: adapter_card(
        "Pirate (style adapter)",
        'Answers of Headrace Tiny in the manner of a pirate: prose begins with "Arr!", and "is" and "are" become "be".\n'
        "Copying, JSON and tool calls are meant to stay as they are.\n",
        report,
    ),
    "adapters/hardware-shop": lambda report, _: adapter_card(
        "Mill and River hardware shop (domain adapter)",
        "The catalogue and the questions of a hardware shop that does not exist: price, aisle and stock of 20 products, and 16 others.\n",
        report,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundled", type=Path, required=True)
    options = parser.parse_args()
    for name, write in CARDS.items():
        result = RESULTS / f"{name.replace('/', '-')}.json"
        if result.exists():
            (options.bundled / name / "README.md").write_text(write(json.loads(result.read_text()), options.bundled))


if __name__ == "__main__":
    main()
