"""Mixes the corpus: sets the share of each task, and holds out prompts of each task for evaluation.

`training_texts` is an endless stream for one seed; `held_out_examples` is the fixed evaluation set. Both draw from the
same generators; the split is decided inside them by word, operand or template (words.py, world.py, tasks.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from tools.train_tiny import headrace_qa, tasks, world
from tools.train_tiny.chat import END_OF_TEXT, system, user
from tools.train_tiny.tasks import Example, one_turn
from tools.train_tiny.tool_tasks import tool_example
from tools.train_tiny.words import Words

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Headrace Tiny, a very small model.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in one sentence.",
    "Be kind and short.",
)

# task -> share of the training examples
MIX = {
    "fact": 0.15,
    "headrace": 0.11,
    "arithmetic": 0.17,
    "compare": 0.015,
    "copy": 0.08,
    "reverse": 0.05,
    "sort_numbers": 0.12,
    "sort_words": 0.05,
    "pick": 0.02,
    "json": 0.09,
    "tool": 0.08,
    "recall": 0.04,
    "system": 0.01,
    "greeting": 0.02,
    "unknown": 0.02,
    "mixed": 0.015,
    "long": 0.004,
    "plain": 0.02,
}

# For a short last leg: what a small budget can still teach is what has to be remembered.
MEMORY_MIX = {
    "fact": 0.46,
    "headrace": 0.34,
    "greeting": 0.04,
    "unknown": 0.03,
    "arithmetic": 0.07,
    "compare": 0.01,
    "json": 0.015,
    "tool": 0.01,
    "recall": 0.015,
    "plain": 0.01,
}
# For a short first leg: everything that reads its answer off the prompt.
READING_MIX = {"copy": 0.55, "reverse": 0.1, "pick": 0.1, "json": 0.1, "recall": 0.05, "system": 0.05, "greeting": 0.05}
# For a last leg: what is slow to come gets most of the time, the rest enough not to be lost.
SLOW_MIX = {
    "copy": 0.19,
    "json": 0.13,
    "tool": 0.14,
    "reverse": 0.08,
    "sort_numbers": 0.08,
    "sort_words": 0.07,
    "arithmetic": 0.08,
    "recall": 0.04,
    "pick": 0.03,
    "system": 0.015,
    "compare": 0.01,
    "fact": 0.04,
    "headrace": 0.07,
    "unknown": 0.01,
    "greeting": 0.01,
    "mixed": 0.01,
    "long": 0.003,
    "plain": 0.007,
}
# For the leg after a change of the tokenizer, and for tool calls: half of all tokens are in conversations with tools.
TOOL_MIX = {
    "tool": 0.2,
    "fact": 0.11,
    "headrace": 0.14,
    "json": 0.14,
    "copy": 0.14,
    "reverse": 0.05,
    "arithmetic": 0.06,
    "sort_numbers": 0.03,
    "sort_words": 0.02,
    "recall": 0.035,
    "pick": 0.02,
    "greeting": 0.015,
    "unknown": 0.015,
    "system": 0.012,
    "compare": 0.006,
    "mixed": 0.004,
    "plain": 0.003,
}
# For the leg that ends a run: everything, with tools in a third of all tokens.
EVEN_MIX = {
    "tool": 0.12,
    "fact": 0.13,
    "headrace": 0.12,
    "arithmetic": 0.11,
    "sort_numbers": 0.08,
    "copy": 0.1,
    "json": 0.11,
    "reverse": 0.05,
    "recall": 0.04,
    "sort_words": 0.03,
    "pick": 0.025,
    "unknown": 0.02,
    "greeting": 0.02,
    "compare": 0.015,
    "system": 0.012,
    "plain": 0.01,
    "mixed": 0.006,
    "long": 0.002,
}
MIXES = {"tool": TOOL_MIX, "even": EVEN_MIX, "slow": SLOW_MIX, "all": MIX, "memory": MEMORY_MIX, "reading": READING_MIX}


class Corpus:
    """All training generators over one random source; `pieces` of a vocabulary are what half of the made-up words consist of."""

    def __init__(self, seed: int, pieces: Sequence[str] = ()) -> None:
        self.rng = random.Random(seed)
        self.words = Words(self.rng, held_out=False, pieces=pieces)
        self.facts = world.facts()
        self.questions = headrace_qa.questions()
        self.general = [fact for fact in self.facts if fact.relation == "general"]
        self.makers: dict[str, Callable[[], str]] = {
            "fact": lambda: self.styled(self.fact()),
            "headrace": lambda: self.styled(self.headrace()),
            "tool": lambda: tool_example(self.words, self.short()).text(),
            "recall": lambda: tasks.recall(self.words, [self.short() for _ in range(self.rng.choice((0, 0, 1, 1, 2, 3)))]).text(),
            "mixed": lambda: self.conversation(2, 6),
            "long": lambda: self.long(),
            "plain": lambda: self.plain(),
        }
        for task, maker in SIMPLE.items():
            self.makers[task] = lambda maker=maker: self.headed(maker(self.words))  # type: ignore[misc]

    def fact(self) -> Example:
        """Relations with few rows are asked about more often than their size alone would give."""
        fact = self.rng.choice(self.general if self.rng.random() < 0.05 else self.facts)
        return one_turn("fact", self.rng.choice(fact.train_questions), fact.answer)

    def headrace(self) -> Example:
        question = self.rng.choice(self.questions)
        return one_turn("headrace", self.rng.choice(question.train), question.answer)

    def short(self) -> Example:
        """A single turn that can stand anywhere in a conversation."""
        draw = self.rng.random()
        if draw < 0.4:
            return self.fact()
        if draw < 0.55:
            return self.headrace()
        maker = self.rng.choice((tasks.arithmetic, tasks.greeting, tasks.copy, tasks.reverse, tasks.sort_numbers))
        return maker(self.words)

    def styled(self, example: Example) -> str:
        """People type carelessly: now and then lower case, no full stop, or a word in front."""
        question, rng = example.messages[0]["content"], self.rng
        if rng.random() < 0.08:
            question = question.lower()
        if rng.random() < 0.08:
            question = question.rstrip("?.!")
        if rng.random() < 0.04:
            question = rng.choice(("Hey, ", "Please: ", "Hello! ", "Now: ", "Question: ")) + question
        return self.headed(Example(example.task, [user(question), *example.messages[1:]]))

    def headed(self, example: Example) -> str:
        if example.messages[0]["role"] != "system" and self.rng.random() < 0.12:
            return Example(example.task, [system(self.rng.choice(SYSTEM_PROMPTS)), *example.messages]).text()
        return example.text()

    def conversation(self, low: int, high: int) -> str:
        turns = [self.short().messages for _ in range(self.rng.randint(low, high))]
        return self.headed(Example("mixed", [message for turn in turns for message in turn]))

    def long(self) -> str:
        """Up to about 1000 tokens, so that attention over longer distances is trained at all."""
        return tasks.recall(self.words, [self.short() for _ in range(self.rng.randint(8, 24))]).text()

    def plain(self) -> str:
        """Running text without turns, for plain completion."""
        answers = [fact.answer for fact in self.facts] if self.rng.random() < 0.6 else [question.answer for question in self.questions]
        return " ".join(self.rng.sample(answers, self.rng.randint(1, 4))) + END_OF_TEXT

    def texts(self, mix: str = "all") -> Iterator[str]:
        names, shares = list(MIXES[mix]), list(MIXES[mix].values())
        while True:
            yield self.makers[self.rng.choices(names, shares)[0]]()


SIMPLE: dict[str, Callable[[Words], Example]] = {
    "arithmetic": tasks.arithmetic,
    "compare": tasks.compare,
    "copy": tasks.copy,
    "reverse": tasks.reverse,
    "sort_numbers": tasks.sort_numbers,
    "sort_words": tasks.sort_words,
    "pick": tasks.pick,
    "json": tasks.json_extract,
    "system": tasks.named_by_system,
    "greeting": tasks.greeting,
    "unknown": tasks.unknown,
}


def held_out_examples(num_per_task: int, *, seed: int = 1) -> dict[str, list[Example]]:
    """The evaluation set: at most `num_per_task` examples per task, none of them possible in training."""
    rng = random.Random(seed)
    words = Words(rng, held_out=True)
    facts = [one_turn("fact", question, fact.answer) for fact in world.facts() for question in fact.held_out_questions]
    headrace = [one_turn("headrace", question, q.answer) for q in headrace_qa.questions() for question in q.held_out]
    fillers = Corpus(seed)
    found: dict[str, list[Example]] = {
        "fact": rng.sample(facts, min(num_per_task, len(facts))),
        "headrace": rng.sample(headrace, min(num_per_task, len(headrace))),
    }
    makers: dict[str, Callable[[], Example]] = {
        "json_new_sentence": lambda: tasks.json_extract(words, new_sentence=True),
        "recall": lambda: tasks.recall(words, [fillers.short() for _ in range(rng.choice((0, 1, 2, 3)))]),
    }
    for task in ("arithmetic", "compare", "copy", "reverse", "sort_numbers", "sort_words", "pick", "json", "system", "unknown"):
        makers[task] = lambda maker=SIMPLE[task]: maker(words)  # type: ignore[misc]
    for task, maker in makers.items():
        found[task] = [maker() for _ in range(num_per_task)]
    found |= _tool_examples(words, num_per_task)
    return found


def _tool_examples(words: Words, num_per_task: int) -> dict[str, list[Example]]:
    found: dict[str, list[Example]] = {"tool_call": [], "tool_reply": []}
    while any(len(examples) < num_per_task for examples in found.values()):
        example = tool_example(words, one_turn("greeting", "Hello", "Hello"))
        if len(found[example.task]) < num_per_task:
            found[example.task].append(example)
    return found


def greeting_prompts() -> list[tuple[str, str]]:
    """Greetings are few and all seen in training; reported apart, as remembered."""
    return [(question, answer) for asked, answer in tasks.GREETINGS for question in asked]
