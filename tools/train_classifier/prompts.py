"""Makes training prompts from the templates in data/, and reads the held-out prompts.

data/written.jsonl has prompts that people might write, for training; data/held_out.jsonl has others, which no training sees.

A template is a line of data/TASK.txt. `{name}` stands for a random entry of data/words.txt or data/texts.txt, `{n}` for a number, and ⏎ for
a line's end. Entries have places of their own.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import NamedTuple

from headrace.text.classifier import TASKS, Task

DATA = Path(__file__).parent / "data"
NUM_PER_TASK = 6000
NUM_COPIES = 20
"""How often a written prompt is used, all but once in another style."""
PLACE = re.compile(r"\{([a-z_]+)\}")
BEFORE = ("hi, ", "hello! ", "hey ", "please ", "Quick one: ", "ok so ", "Good morning. ", "can you help? ", "sorry to bother you, ", "um ")
AFTER = (" thanks", " Thank you!", " pls", " thx in advance", " Answer in English.", " It's urgent.", " asap", " please", " cheers", " :)")


class TrainingPrompt(NamedTuple):
    """template: its number among all, by which prompts of one template stay in one fold"""

    text: str
    task: Task
    template: int


class WrittenPrompt(NamedTuple):
    """output_tokens: what an answer takes, as estimated by the person that wrote the prompt"""

    text: str
    task: Task
    output_tokens: int


def read_lines(name: str) -> list[str]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def read_entries() -> dict[str, list[str]]:
    """words.txt has all entries of a name in one line, texts.txt one entry a line."""
    found: dict[str, list[str]] = {}
    for line in read_lines("words.txt"):
        name, _, entries = line.partition(": ")
        found[name] = entries.split(" | ")
    for line in read_lines("texts.txt"):
        name, _, entry = line.partition(": ")
        found.setdefault(name, []).append(entry)
    return found


def training_prompts(seed: int = 0, num_per_task: int = NUM_PER_TASK) -> list[TrainingPrompt]:
    """The templates of a task in turn, so that each is used equally often. Raises KeyError for a place without entries."""
    draw, entries, found, number = random.Random(seed), read_entries(), [], 0
    for task in TASKS:
        templates = read_lines(f"{task}.txt")
        for index in range(num_per_task):
            place = index % len(templates)
            text = styled(filled(templates[place], entries, draw), draw)
            found.append(TrainingPrompt(text, task, number + place))
        number += len(templates)
    for place, (text, task, _) in enumerate(read_written("written.jsonl")):
        found += [TrainingPrompt(text if copy == 0 else styled(text, draw), task, number + place) for copy in range(NUM_COPIES)]
    return found


def filled(template: str, entries: dict[str, list[str]], draw: random.Random) -> str:
    def entry(match: re.Match[str]) -> str:
        if (name := match[1]) == "n":
            return str(draw.choice((draw.randrange(2, 13), draw.randrange(13, 100), draw.randrange(100, 10_000))))
        return filled(draw.choice(entries[name]), entries, draw)

    return PLACE.sub(entry, template).replace("⏎", "\n")


def styled(text: str, draw: random.Random) -> str:
    """What people do to any prompt: greetings, no capitals, no full stop, slips of the fingers."""
    if draw.random() < 0.15:
        text = draw.choice(BEFORE) + text
    if draw.random() < 0.15:
        text += draw.choice(AFTER)
    if draw.random() < 0.25:
        text = text.lower()
    if draw.random() < 0.2:
        text = text.rstrip(".?!")
    while draw.random() < 0.25 and len(text) > 10:
        at = draw.randrange(len(text) - 1)
        text = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text


def read_written(name: str) -> list[WrittenPrompt]:
    rows = map(json.loads, (DATA / name).read_text(encoding="utf-8").splitlines())
    return [WrittenPrompt(row["text"], Task(row["task"]), row["output_tokens"]) for row in rows]


def held_out_prompts() -> list[WrittenPrompt]:
    return read_written("held_out.jsonl")
