"""Tests the vetting process: what it passes and refuses, within which bounds, and what happens when it is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from grammar_kit import EOS, PERSON, TINY, VOCAB, lark, regex, schema, vocabulary

from headrace.core.errors import CheckpointError, InvalidRequest, SequenceFailed
from headrace.core.grammar import Grammar
from headrace.engine.grammar.limits import MAX_COMPILED_BYTES
from headrace.engine.grammar.vetting import GrammarVetter

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def vetter() -> Iterator[GrammarVetter]:
    made = GrammarVetter(TINY, VOCAB, EOS)
    yield made
    made.close()


def test_the_process_reads_the_vocabulary_and_lets_a_grammar_pass(vetter: GrammarVetter) -> None:
    assert vetter.vocabulary() == vocabulary()
    assert 0 <= vetter.vet(schema(PERSON)) < MAX_COMPILED_BYTES
    # enough words for the heap to grow
    assert 0 < vetter.vet(regex("|".join(f"word{i}" for i in range(6000)))) < MAX_COMPILED_BYTES


MANY_RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3200)) + 'r3200: "x"'
"""Takes less than half of the CPU time when the stack ends, so that a busy machine does not change which limit it is."""

WIDE = "start: " + " | ".join(f'"{i}x"' for i in range(2010))
TERMINALS = "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(40)) + 'T40: "x"'
PROPERTIES = '{"type":"object","properties":{' + ",".join(f'"p{i}":{{"type":"string"}}' for i in range(5000)) + "}}"

OVER_BUDGET = [
    (lark(TERMINALS), "within 120 ms of CPU time"),
    (schema(PROPERTIES), "within 120 ms of CPU time"),
    (lark(MANY_RULES), "MiB of memory and 8 MiB of stack"),
    (lark(WIDE), "masks stay within their limits"),
    (
        schema('{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'),
        "references that end at a schema with other keywords",
    ),
    (schema('{"items":' * 100 + "{}" + "}" * 100), "at most 64 levels"),
    (schema('{"properties":{"a":{"uniqueItems":true}}}'), 'got "uniqueItems". Leave them out. See #/properties/a.'),
]


@pytest.mark.parametrize(("grammar", "said"), OVER_BUDGET, ids=[said for _, said in OVER_BUDGET])
def test_a_hostile_grammar_is_refused_by_the_limit_it_exceeds_and_the_process_goes_on(
    vetter: GrammarVetter, grammar: Grammar, said: str
) -> None:
    vetter.vocabulary()
    assert vetter._process is not None
    before = vetter._process.pid
    with pytest.raises(InvalidRequest) as caught:
        vetter.vet(grammar)
    assert said in str(caught.value)
    assert vetter.vet(regex("[0-9]+")) >= 0
    assert vetter._process.pid == before


def test_a_process_that_was_killed_is_started_again() -> None:
    vetter = GrammarVetter(TINY, VOCAB, EOS)
    vetter.vocabulary()
    assert vetter._process is not None
    os.kill(vetter._process.pid, signal.SIGKILL)
    vetter._process.wait()
    assert vetter.vet(regex("[0-9]+")) >= 0
    vetter.close()


def test_a_grammar_whose_process_ends_each_time_fails_its_sequence_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    vetter = GrammarVetter(TINY, VOCAB, EOS)
    start = vetter._started
    num_starts = 0

    def start_and_kill() -> object:
        nonlocal num_starts
        num_starts += 1
        channel = start()
        assert vetter._process is not None
        os.kill(vetter._process.pid, signal.SIGKILL)
        return channel

    monkeypatch.setattr(vetter, "_started", start_and_kill)
    with pytest.raises(SequenceFailed, match="the process that does it has ended"):
        vetter.vet(regex("[0-9]+"))
    assert num_starts == 2
    vetter.close()


def test_closing_ends_a_vetting_that_is_under_way() -> None:
    vetter = GrammarVetter(TINY, VOCAB, EOS)
    vetter.vocabulary()
    assert vetter._process is not None
    os.kill(vetter._process.pid, signal.SIGSTOP)
    raised: list[BaseException] = []

    def vet() -> None:
        try:
            vetter.vet(regex("[0-9]+"))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=vet)
    thread.start()
    while not vetter._lock.locked():  # until the thread vets
        time.sleep(0.001)
    vetter.close()
    thread.join()
    assert isinstance(raised[0], SequenceFailed)


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    vetter = GrammarVetter(tmp_path, VOCAB, EOS)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        vetter.vet(regex("a"))
    vetter.close()
