"""Draws requests at random, with all that a client may ask for, and runs a crowd of them in one engine: cut off, resumed, preempted.

`draw_trials` is a function of its seed alone. How a crowd's steps fall is not: grammars are compiled on a thread meanwhile.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from grammar_samples import larks, regexes, schemas
from real_engine import Answer, Key, RealEngine

from headrace.core.grammar import Grammar
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.sampling import SamplingParams
from headrace.core.tools import CallMode, FunctionTool, ToolChoice
from headrace.core.update import FinishReason
from headrace.text.output.forced import forced_grammar
from headrace.text.output.formats import TOOL_FORMATS

VOCAB = 2048
END_IDS = (0, 2)
LONGEST_PROMPT, LONGEST_OUTPUT = 130, 48
NUM_GRAMMARS = {"schema": 40, "regex": 20, "lark": 12, "choice": 4, "tools": 30}
"""Different grammars of each kind in one draw: an engine compiles each once, and holds about 120 (docs/structured.md)."""
SHARES = (("free", 0.5), ("tools", 0.2), ("schema", 0.14), ("regex", 0.08), ("lark", 0.05), ("choice", 0.03))
"""How often a request has a grammar of which kind; "free": none."""
MOST_OPEN = 24


@dataclass(frozen=True)
class Trial:
    """A request and what becomes of it.

    kind        the kind of its grammar, or "free"
    cut         the client leaves once this many tokens of all its sequences were emitted; None: it stays
    is_resumed  each of its sequences then goes on, as another request, from what was emitted
    """

    request: EngineRequest
    kind: str
    cut: int | None
    is_resumed: bool

    def features(self) -> list[str]:
        params = self.request.params
        has = {
            self.kind: True,
            "greedy": params.is_greedy,
            "sampled": not params.is_greedy,
            "n > 1": params.n > 1,
            "logprobs": params.logprobs is not None,
            "prompt_logprobs": params.prompt_logprobs is not None,
            "penalties": params.has_penalties,
            "logit_bias": bool(params.logit_bias),
        }
        return [name for name, is_so in has.items() if is_so]


def draw_trials(count: int, seed: int) -> list[Trial]:
    rng = random.Random(seed)
    grammars = _grammars(rng)
    common = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(8, 60))] for _ in range(6)]
    return [_trial(rng, f"r{number}", grammars, common) for number in range(count)]


def _trial(rng: random.Random, name: str, grammars: dict[str, list[Grammar]], common: list[list[int]]) -> Trial:
    (kind,) = rng.choices([kind for kind, _ in SHARES], [share for _, share in SHARES])
    prompt = (rng.choice(common) if rng.random() < 0.6 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 70))]
    params = _params(rng, is_free=kind == "free")
    request = EngineRequest(
        request_id=RequestId(name),
        prompt_ids=tuple(prompt),
        params=params,
        grammar=None if kind == "free" else rng.choice(grammars[kind]),
        tenant=rng.choice(("", "", "other")),
        priority=rng.choice(list(PriorityClass)),
        prefix_caching=rng.random() < 0.9,
    )
    cut = rng.randrange(params.n * LONGEST_OUTPUT // 2) if rng.random() < 0.4 else None
    return Trial(request, kind, cut, cut is not None and rng.random() < 0.7)


def _params(rng: random.Random, *, is_free: bool) -> SamplingParams:
    given: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7, 1.0, 1.0, 1.6)), "seed": rng.getrandbits(62)}
    given["max_tokens"] = rng.randint(1, LONGEST_OUTPUT)
    rare: dict[str, Any] = {
        "n": rng.randint(2, 3),
        "top_p": rng.choice((0.5, 0.9, 0.95)),
        "top_k": rng.choice((1, 5, 40)),
        "min_p": rng.choice((0.01, 0.1)),
        "presence_penalty": rng.uniform(-1, 1),
        "frequency_penalty": rng.uniform(-1, 1),
        "repetition_penalty": rng.uniform(0.8, 1.4),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-5, 9), rng.choice(END_IDS): rng.uniform(0, 6)},
        "min_tokens": rng.randint(0, given["max_tokens"]),
        "stop_token_ids": tuple(rng.randrange(3, VOCAB) for _ in range(40)),
        "prompt_logprobs": rng.randrange(3),
    }
    given.update({name: value for name, value in rare.items() if rng.random() < 0.15})
    if rng.random() < 0.6:
        given["logprobs"] = rng.randrange(5)
    if is_free:
        given["ignore_eos"] = rng.random() < 0.5
    return SamplingParams(**given)


def _grammars(rng: random.Random) -> dict[str, list[Grammar]]:
    seed = rng.randrange(2**32)
    drawn = {"schema": schemas, "regex": regexes, "lark": larks}
    made = {kind: [sample.grammar for sample in draw(NUM_GRAMMARS[kind], seed)] for kind, draw in drawn.items()}
    made["choice"] = [Grammar.choice(rng.sample(("yes", "no", "perhaps", "yes, of course", "n"), 3)) for _ in range(NUM_GRAMMARS["choice"])]
    drawn_schemas = (json.loads(sample.grammar.source) for sample in schemas(1000, seed + 1))
    arguments = list(islice((schema for schema in drawn_schemas if schema.get("type") == "object"), 20))
    made["tools"] = [_calls(rng, arguments) for _ in range(NUM_GRAMMARS["tools"])]
    return made


def _calls(rng: random.Random, arguments: Sequence[dict[str, object]]) -> Grammar:
    names = ("find", "get_weather", "send-mail")[: rng.randint(1, 3)]
    tools = [FunctionTool(name=name, parameters=rng.choice(arguments), is_strict=True) for name in names]
    required = ToolChoice(mode=CallMode.REQUIRED, is_parallel=rng.random() < 0.5)
    choice = rng.choice((required, required, replace(required, name=names[0]), ToolChoice()))
    grammar = forced_grammar(TOOL_FORMATS[rng.choice(("hermes", "llama3_json", "mistral"))], tools, choice)
    assert grammar is not None
    return grammar


@dataclass
class Crowd:
    """Runs trials in one engine, about MOST_OPEN requests at a time, and knows what each sequence must have been answered.

    expected  of each sequence, resumed ones included: the part of its solo run that it emits
    counts    "requests", "aborted", "resumed", "sequences", "tokens", ..., and the features of the trials
    """

    engine: RealEngine
    solo: dict[Key, Answer]
    rng: random.Random
    expected: dict[Key, Answer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _open: dict[str, Trial] = field(default_factory=dict)

    def run(self, trials: Sequence[Trial]) -> None:
        waiting = list(reversed(trials))
        while waiting or self.engine.engine.scheduler.sequences.has_work:
            while waiting and len(self._open) < MOST_OPEN and self.rng.random() < 0.8:
                self._begin(waiting.pop())
            for trial in list(self._open.values()):
                self._look_after(trial)
            if not self.engine.engine.turn() and self.engine.engine.scheduler.sequences.has_work:
                self.engine.engine.idle()  # a grammar is compiled on another thread

    def _begin(self, trial: Trial) -> None:
        request = trial.request
        self.counts.update(["requests", *trial.features()])
        self._open[request.request_id] = trial
        self.expected.update({key: self.solo[key] for key in _keys(request)})
        self.engine.submit(request)

    def _look_after(self, trial: Trial) -> None:
        request = trial.request
        keys = _keys(request)
        if all(key in self.engine.finish for key in keys):
            del self._open[request.request_id]
        elif trial.cut is not None and sum(len(self.engine.tokens[key]) for key in keys) >= trial.cut:
            self.engine.engine.cancel(request.request_id)
            del self._open[request.request_id]
            self.counts["resumed" if trial.is_resumed else "aborted"] += 1
            for key in keys:
                if key not in self.engine.finish:
                    self._cut(trial, key)

    def _cut(self, trial: Trial, key: Key) -> None:
        whole, given = self.solo[key], self.engine.so_far(key)
        num_tokens = len(given.token_ids)
        self.counts["sequences resumed" if trial.is_resumed else "sequences aborted"] += 1
        self.expected[key] = whole.until(num_tokens, len(given.prompt_logprobs))
        if not trial.is_resumed:
            return
        part = trial.request.resumed(key[1], given.token_ids, "")
        name = f"{key[0]} {key[1]} resumed"
        self.engine.submit(replace(part, request_id=RequestId(name), params=part.params.with_(prompt_logprobs=None)))
        self.expected[name, key[1]] = whole.after(num_tokens)

    def differences(self) -> list[str]:
        """In words; empty: the engine kept its promise."""
        found = []
        for key, expected in self.expected.items():
            given = self.engine.so_far(key)
            if expected.finish is None:
                given = given._replace(finish=None if given.finish is FinishReason.CANCELLED else given.finish)
            self.counts["sequences"] += 1
            self.counts["tokens"] += len(given.token_ids)
            if given != expected:
                found.append(f"{key}: {given} is not {expected}"[:600])
        return found


def _keys(request: EngineRequest) -> list[Key]:
    return [(str(request.request_id), index) for index in request.indices]
