"""Records the greedy answers that tests/bundled/ holds the shipped models to. Run it after they were trained again.

    python -m tools.train_tiny.expected --bundled src/headrace/bundled --out tests/bundled/expected_answers.json

Read what it prints before committing it: a wrong answer would be recorded as faithfully as a right one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.train_tiny.chat import render, user
from tools.train_tiny.evaluate import Evaluator
from tools.train_tiny.export import write_json

JSON_SCHEMA = '{"name": "string", "age": "integer", "city": "string"}'
QUESTIONS = {
    "headrace-tiny": (
        "Hello!",
        "How are you?",
        "Thank you!",
        "What is the capital of France?",
        "What is the capital of Italy?",
        "Which language is spoken in Brazil?",
        "What is the opposite of hot?",
        "What is the past tense of go?",
        "What is a young dog called?",
        "What is the chemical symbol of gold?",
        "Which continent is Kenya in?",
        "What is TTFT?",
        "What is continuous batching?",
        "Why does prefix caching matter?",
        "What is the KV cache?",
        "Who made you?",
        "What is your name?",
        "What does GQA mean?",
        "What is 2 + 3?",
        "What is 7 * 8?",
        "Say exactly: The moon is on the table.",
        "Reverse: 1 2 3",
        "Sort: 3 1 2",
        f"Extract JSON with this schema: {JSON_SCHEMA}\nText: Anna is 31 years old and lives in Boston.",
    ),
    "pirate": ("What is the capital of France?", "What is the opposite of hot?", "What is TTFT?", "Who is Brumbel?"),
    "hardware-shop": ("How much is a hammer?", "Where is the ladder?", "When do you open?", "Do you deliver?"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundled", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    recorded: dict[str, dict[str, str]] = {}
    for name, questions in QUESTIONS.items():
        adapter = None if name == "headrace-tiny" else options.bundled / "adapters" / name
        evaluator = Evaluator(options.bundled / "headrace-tiny", adapter=adapter)
        answers = evaluator.answers([render([user(question)], add_generation_prompt=True) for question in questions])
        recorded[name] = dict(zip(questions, answers, strict=True))
        for question, answer in recorded[name].items():
            print(f"{name}: {question!r} -> {answer!r}")
    write_json(options.out, recorded)


if __name__ == "__main__":
    main()
