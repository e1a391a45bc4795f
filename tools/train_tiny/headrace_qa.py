"""Reads about 300 questions on Headrace and LLM serving for the corpus: what a thing is, and what it is for.

`data/headrace_terms.txt` holds one line per thing: the name, what it is, what it is good for. Each gives two questions,
asked through the templates below; the last two of each list are held out for evaluation. `data/headrace_questions.txt`
are questions that fit no template: question, answer, paraphrases; the last paraphrase is held out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.train_tiny.world import rows

WHAT = (
    "What is {t}?",
    "What is {t} in LLM serving?",
    "Explain {t}.",
    "Define {t}.",
    "What does {t} mean?",
    "Can you explain {t}?",
    "Tell me about {t}.",
    "What do you know about {t}?",
    "Describe {t}.",
    "What's {t}?",
    "Can you tell me what {t} is?",
    "Explain {t} in one sentence.",
    "Please explain {t}.",
    "What is meant by {t}?",
)
WHY = (
    "Why does {t} matter?",
    "What is {t} good for?",
    "Why use {t}?",
    "What is the benefit of {t}?",
    "Why do we need {t}?",
    "What is the point of {t}?",
    "Why is {t} useful?",
    "What do we gain from {t}?",
    "What is the purpose of {t}?",
    "Why would I want {t}?",
    "Why is {t} important?",
    "What is {t} useful for?",
)


@dataclass(frozen=True, slots=True)
class Question:
    """One answer with the ways of asking for it."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str


def questions() -> list[Question]:
    found: list[Question] = []
    for term, what, why in rows("headrace_terms"):
        for templates, answer in ((WHAT, what), (WHY, why)):
            asked = tuple(template.format(t=term) for template in templates)
            found.append(Question(asked[:-2], asked[-2:], answer))
    for first, answer, *others in rows("headrace_questions"):
        found.append(Question((first, *others[:-1]), (others[-1],), answer))
    return found
