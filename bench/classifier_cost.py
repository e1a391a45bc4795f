"""Computes what the request classifier saves on the held-out prompts of tools/train_classifier, and how often it errs.

    python -m bench.classifier_cost -> bench/results/classifier-cost.json

No model answers: each prompt's label says whether a small model would do, and the person that wrote it estimated the tokens of its answer.
A prompt's own tokens are a quarter of its bytes. A large model's token costs PRICE_RATIO times a small one's; input and output cost the
same. The figures follow from the committed weights and prompts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bench.harness import RESULTS, write_portable
from headrace.bundled import CLASSIFIER
from headrace.core.request import PriorityClass
from headrace.policy.routing.model_size import size_for
from headrace.text.classifier import TASKS, Classified, RequestClassifier, Task
from tools.train_classifier.prompts import WrittenPrompt, held_out_prompts

PRICE_RATIO = 8
BYTES_PER_TOKEN = 4
MIXES: Mapping[str, Mapping[Task, float]] = {
    "even": {Task.QUESTION: 1 / 3, Task.CODE: 1 / 3, Task.REASONING: 1 / 3},
    "three quarters questions": {Task.QUESTION: 0.75, Task.CODE: 0.15, Task.REASONING: 0.10},
    "nine tenths questions": {Task.QUESTION: 0.90, Task.CODE: 0.06, Task.REASONING: 0.04},
}
"""Shares of the requests. Assumed, since no trace of real users is at hand."""


class JudgedPrompt(NamedTuple):
    prompt: WrittenPrompt
    classified: Classified

    @property
    def prompt_tokens(self) -> int:
        return -(-len(self.prompt.text.encode()) // BYTES_PER_TOKEN)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.prompt.output_tokens

    @property
    def needs_large(self) -> bool:
        return self.prompt.task is not Task.QUESTION

    def goes_large(self, priority: PriorityClass) -> bool:
        found = self.classified
        return size_for(found.task, found.question, num_tokens=self.prompt_tokens, priority=priority).is_large


def judged_prompts() -> list[JudgedPrompt]:
    classifier = RequestClassifier(CLASSIFIER.read_bytes())
    return [JudgedPrompt(prompt, classifier.classify(prompt.text)) for prompt in held_out_prompts()]


def confusion(rows: list[JudgedPrompt]) -> dict[Task, dict[Task, int]]:
    """The label -> the classifier's task -> the number of prompts."""
    return {
        label: {task: sum(row.prompt.task is label and row.classified.task is task for row in rows) for task in TASKS} for label in TASKS
    }


def mean_over(rows: list[JudgedPrompt], mix: Mapping[Task, float], value: Callable[[JudgedPrompt], float]) -> float:
    """The mean of a value of a request where tasks have the shares of the mix."""
    sums = {task: [value(row) for row in rows if row.prompt.task is task] for task in TASKS}
    return sum(mix[task] * sum(values) / len(values) for task, values in sums.items())


def figures(rows: list[JudgedPrompt], mix: Mapping[Task, float], priority: PriorityClass) -> dict[str, float]:
    """saved, saved_at_equal_lengths: shares of the cost of sending all to the large model, by tokens and by requests
    too_small, too_large: shares of all requests that need a large model and get a small one, and the reverse
    """

    def cost(is_large: Callable[[JudgedPrompt], bool]) -> float:
        return mean_over(rows, mix, lambda row: row.num_tokens * (PRICE_RATIO if is_large(row) else 1))

    def routed(row: JudgedPrompt) -> bool:
        return row.goes_large(priority)

    all_large = cost(lambda row: True)
    found = {
        "saved": 1 - cost(routed) / all_large,
        "saved_by_labels": 1 - cost(lambda row: row.needs_large) / all_large,
        "saved_all_small": 1 - 1 / PRICE_RATIO,
        "saved_at_equal_lengths": mean_over(rows, mix, lambda row: not routed(row)) * (1 - 1 / PRICE_RATIO),
        "too_small": mean_over(rows, mix, lambda row: row.needs_large and not routed(row)),
        "too_large": mean_over(rows, mix, lambda row: routed(row) and not row.needs_large),
    }
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    rows = judged_prompts()
    table = confusion(rows)
    by_mix = {name: {each.name.lower(): figures(rows, mix, each) for each in PriorityClass} for name, mix in MIXES.items()}
    facts = {"num_prompts": len(rows), "num_right": sum(table[task][task] for task in TASKS), "confusion": table}
    for name, found in by_mix.items():
        print(name, found)
    print(facts)
    write_portable(RESULTS / "classifier-cost.json", {**facts, "price_ratio": PRICE_RATIO, "mixes": MIXES, "figures": by_mix})


if __name__ == "__main__":
    main()
