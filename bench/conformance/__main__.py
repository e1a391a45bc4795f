"""Checks whether the engine's grammars enforce the JSON schemas that they accept: the official test suite, and 500 generated schemas.

    python -m bench.conformance [--no-suite] -> bench/results/grammar-conformance.json and the table in docs/structured.md

A schema is accepted or refused by name. Of an accepted one, each valid value is to be taken token by token, in the bundled model's tokens,
and each invalid one refused. The suite's own judgement counts; generated values are judged by the package `jsonschema`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import llguidance

from bench.conformance import suite
from bench.conformance.judge import Judge, spellings
from bench.conformance.schemas import cases
from bench.harness import RESULTS, ROOT, replace_block, write_portable
from headrace.bundled import DEFAULT_MODEL
from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.engine.grammar.compiling import GrammarVocabulary, TokenTrie, compile_grammar
from headrace.fleet.weights import resolve_model
from headrace.lab.environment import environment
from headrace.text.tokenizer import Tokenizer

PAGE = ROOT / "docs" / "structured.md"
BLOCK_NAME = "conformance"
ASSERTED = "a format that the draft does not assert is enforced"


@dataclass(slots=True)
class Tally:
    """Counts of one set of schemas.

    refusals        why schemas were refused -> how many
    refused_valid   why valid values of accepted schemas were refused -> how many
    taken_invalid   invalid values of accepted schemas that were taken: the schema, and the value
    """

    num_schemas: int = 0
    num_accepted: int = 0
    num_valid: int = 0
    num_invalid: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    refused_valid: Counter[str] = field(default_factory=Counter)
    taken_invalid: list[tuple[str, str]] = field(default_factory=list)


class Conformance:
    """Grammars over the bundled model's tokens."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.load(folder)
        self._trie = TokenTrie(GrammarVocabulary.load(folder, self._tokenizer.vocab_size, (min(self._tokenizer.special_ids),)))

    def judge(self, source: str) -> Judge:
        """Raises InvalidRequest for a schema that is refused."""
        grammar = Grammar(GrammarKind.JSON_SCHEMA, source).checked()
        return Judge(compile_grammar(self._trie, grammar), lambda text: list(self._tokenizer.encode(text, add_special_tokens=False)))


def reason(error: InvalidRequest) -> str:
    """A refusal without what differs between schemas."""
    return f"{error.limit}: {error.given}" if isinstance(error.given, str) else f"{error.limit}. {error.remedy.partition(':')[0]}"


def tally_suite(conformance: Conformance, groups: Iterable[suite.SuiteGroup]) -> dict[str, Tally]:
    """By draft."""
    tallies = {draft: Tally() for draft in suite.DRAFTS}
    for group in groups:
        tally = tallies[group.draft]
        tally.num_schemas += 1
        try:
            judge = conformance.judge(group.source)
        except InvalidRequest as error:
            tally.refusals[reason(error)] += 1
            continue
        tally.num_accepted += 1
        for value, is_valid in group.values:
            is_taken = judge.takes_in_some_order(value)
            _count(tally, group.source, value, is_valid=is_valid, is_taken=is_taken)
            if is_valid and not is_taken:
                tally.refused_valid[ASSERTED if group.file == "format" else judge.why_refused(value) or f"{group.file}: {group.name}"] += 1
    return tallies


def tally_generated(conformance: Conformance, num_schemas: int, *, seed: int = 0) -> Tally:
    """Each valid value in three spellings; keys in the order of the schema."""
    tally = Tally()
    for case in cases(num_schemas, seed=seed):
        tally.num_schemas += 1
        source = json.dumps(case.schema)
        try:
            judge = conformance.judge(source)
        except InvalidRequest as error:
            tally.refusals[reason(error)] += 1
            continue
        tally.num_accepted += 1
        for value in case.valid:
            is_taken = all(judge.takes(text) for text in spellings(value))
            _count(tally, source, value, is_valid=True, is_taken=is_taken)
            if not is_taken:
                tally.refused_valid[judge.why_refused(value) or source] += 1
        for value in case.invalid:
            _count(tally, source, value, is_valid=False, is_taken=judge.takes_in_some_order(value))
    return tally


def _count(tally: Tally, source: str, value: Any, *, is_valid: bool, is_taken: bool) -> None:
    tally.num_valid += is_valid
    tally.num_invalid += not is_valid
    if is_taken and not is_valid:
        tally.taken_invalid.append((source, json.dumps(value)))


def markdown(tallies: dict[str, Tally]) -> str:
    lines = ["| schemas | number | accepted | valid values taken | invalid values refused |", "|---|---|---|---|---|"]
    for name, tally in tallies.items():
        taken, refused = tally.num_valid - tally.refused_valid.total(), tally.num_invalid - len(tally.taken_invalid)
        counts = f"{taken} of {tally.num_valid} | {refused} of {tally.num_invalid}"
        lines.append(f"| {name} | {tally.num_schemas} | {tally.num_accepted} | {counts} |")
    reasons: Counter[str] = sum((tally.refused_valid for tally in tallies.values()), Counter())
    lines += ["", "Why valid values were refused: " + "; ".join(f"{why} ({count})" for why, count in reasons.most_common()) + "."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.conformance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-suite", action="store_true", help="only the generated schemas: nothing is downloaded or written")
    parser.add_argument("--num-generated", type=int, default=500)
    given = parser.parse_args(arguments)
    conformance = Conformance(Path(resolve_model(DEFAULT_MODEL)))
    tallies = {} if given.no_suite else tally_suite(conformance, suite.groups(suite.fetch()))
    tallies["generated"] = tally_generated(conformance, given.num_generated)
    print(markdown(tallies))
    if not given.no_suite:
        rows = {name: {each.name: getattr(tally, each.name) for each in fields(tally)} for name, tally in tallies.items()}
        origin = {"environment": environment(), "suite": suite.ARCHIVE, "llguidance": llguidance.__version__}
        write_portable(RESULTS / "grammar-conformance.json", {**origin, "tallies": rows})
        replace_block(PAGE, BLOCK_NAME, markdown(tallies))


if __name__ == "__main__":
    main()
