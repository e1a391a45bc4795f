"""Writes the body of a request for one foreign server, and learns from the server's refusals which of its fields it takes.

A server may refuse by name a field that says nothing about the answer, such as `stream_options`, or know `max_tokens` by one of its two
names only, or give one choice whatever `n` says. It is asked again in a form that it takes; `ForeignServer` keeps that form for later
requests once an answer came in it. A field that does say something about the answer is never left out: the client gets its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.core.ids import RequestId
from headrace.core.sampling import MAX_SEED
from headrace.gateway.upstream.foreign_json import read_json
from headrace.gateway.upstream.generation_request import MARKS, PASSED_IN_BODY, PASSED_IN_CHAT, without

LIMITS = ("max_tokens", "max_completion_tokens")
"""The two names of one limit: OpenAI's reasoning models refuse the first, many servers know it alone."""

WITHOUT_MEANING = frozenset(("stream_options", *PASSED_IN_BODY, *PASSED_IN_CHAT))
"""Fields of a body that are not about the answer."""

LEFT_OUT_INSIDE = MARKS | {"reasoning_content"}
"""Fields of messages, their parts and calls, and of functions, that a server without them has no use for."""

SALT = "cache_salt"

ADDED = frozenset(("model", "stream", SALT))
"""Fields that a client did not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRequest:
    """A request in OpenAI's form, for any of the model's servers.

    fields  the body without the fields that differ between servers
    salt    the tenant's salt
    """

    request_id: RequestId
    path: str
    fields: dict[str, Any]
    salt: bytes
    num_prompts: int
    num_sequences: int

    @property
    def _n(self) -> int:
        return self.num_sequences // self.num_prompts

    def parts(self) -> list[Sequence[int]]:
        """Indices of the sequences that are asked for at once. Beside several prompts `n` would leave open whose answer a server that
        ignores `n` has given."""
        size = self._n if self._n > 1 else self.num_sequences
        return [range(first, first + size) for first in range(0, self.num_sequences, size)]

    def fields_of(self, indices: Sequence[int]) -> dict[str, Any]:
        """The fields that ask for these sequences of one of `parts`."""
        if len(indices) == self.num_sequences:
            return self.fields
        fields, first = dict(self.fields), indices[0] % self._n
        if self.num_prompts > 1:
            prompts = [fields["prompt"][number] for number in dict.fromkeys(index // self._n for index in indices)]
            fields["prompt"] = prompts[0] if len(prompts) == 1 else prompts
        if "n" in fields:
            fields["n"] = len(indices)
        if first and (seed := fields.get("seed")) is not None:  # the same seed would draw the same answer
            fields["seed"] = seed + first if seed <= MAX_SEED - first else seed - first
        return fields

    def num_prompts_of(self, indices: Sequence[int]) -> int:
        """The number of prompts that are sent to ask for these sequences."""
        return len({index // self._n for index in indices})

    def share(self, indices: Sequence[int], refused: Collection[str], *, takes_one_prompt: bool) -> Sequence[int]:
        """The part of the sequences that a server is asked for at once. takes_one_prompt: it answers one prompt of several"""
        return indices[:1] if (takes_one_prompt if self._n == 1 else "n" in refused) else indices


def written(fields: Mapping[str, Any], refused: Collection[str]) -> dict[str, Any]:
    """The fields in a form without those that the server refuses. The limit of tokens is written by its other name."""
    made = {name: value for name, value in fields.items() if name not in refused or name not in WITHOUT_MEANING}
    if made.get("n") == 1 or "n" in refused:
        made.pop("n", None)
    for name, other in (LIMITS, LIMITS[::-1]):
        if name in refused and name in made:
            made[other] = made.pop(name)
            break
    marks = LEFT_OUT_INSIDE.intersection(refused)
    return made | {name: without(made[name], marks) for name in ("messages", "tools") if marks and name in made}


def refuse(refused: set[str], name: str) -> None:
    """Note that a server refuses a field. It takes at least one name of the limit."""
    if name in LIMITS:
        refused.difference_update(LIMITS)
    refused.add(name)


def is_adaptable(name: str, found: Collection[str]) -> bool:
    """Whether a request in another form asks for the same answer, perhaps in several requests. found: names refused before"""
    if name in LIMITS:
        return not any(limit in found for limit in LIMITS)
    return name not in found and (name in WITHOUT_MEANING or name in LEFT_OUT_INSIDE or name == "n")


# ------------------------------------------------------------------------------------------------------------------------ refusals

_TEXTS = ("message", "msg", "detail", "error", "title", "reason")
_IN_MESSAGES = ("messages", "tools")
_NAME = re.compile(r"[A-Za-z_]\w*")
_OTHER_FIELDS = re.compile(
    r"\b(?:expected one of|must be one of|did you mean|use ['\"`]|supported (?:fields|parameters|params))", re.IGNORECASE
)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ONE_CHOICE = re.compile(
    r"\bn (?:must|should|can|has to|is|>|=)|\bonly (?:one|1|a single) (?:\w+ )?(?:choice|completion)|multiple (?:choices|completions)",
    re.IGNORECASE,
)


def refused_field(body: bytes, names: Collection[str]) -> str | None:
    """The field that an error names. Its texts are only searched, never shown.

    body   of the error
    names  of the fields that the request had, inside messages and functions too

    A place (`param`, `loc`) decides before any text, in which the first name counts.
    """
    try:
        error = read_json(body)
    except ValueError:
        return None
    found = list(_said(error))
    places = [found_in for is_place, value in found if is_place and (found_in := _named_by_place(value, names))]
    texts = [found_in for is_place, value in found if not is_place and (found_in := _named_by_text(value, names))]
    return next(iter([*places, *texts]), None)


def _said(value: object) -> Iterator[tuple[bool, str]]:
    """(whether it is a place, text) of all that an error says, without what it quotes of the request."""
    if isinstance(value, list):
        for each in value:
            yield from _said(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name == "param" and isinstance(each, str):
                yield True, each
            elif name == "loc" and isinstance(each, list):
                yield True, ".".join(map(str, each))
            elif name in _TEXTS:
                yield from [(False, each)] if isinstance(each, str) else _said(each)


def _named_by_place(place: str, names: Collection[str]) -> str | None:
    parts = [part for part in _NAME.findall(place) if part != "body"]
    inside = [part for part in parts if part in LEFT_OUT_INSIDE and part in names] if parts[:1] and parts[0] in _IN_MESSAGES else parts[:1]
    return next((part for part in inside if part in names), None)


def _named_by_text(text: str, names: Collection[str]) -> str | None:
    """The first of the names in a text. A name that is a word of English has to be quoted, or to stand behind a colon or `parameter`."""
    if (other := _OTHER_FIELDS.search(text)) is not None:
        text = text[: other.start()]
    text = _CAMEL.sub("_", text).lower()
    found = {}
    for name in names:
        before = "" if "_" in name else r"(?:[\"'`.(]|: |\b(?:parameter|param|field|argument|property|option)s? )"
        if (match := re.search(rf"{before}(?<![a-z0-9_]){name}(?![a-z0-9_])", text)) is not None:
            found[match.start()] = name
    if not found and "n" in names and _ONE_CHOICE.search(text) is not None:
        return "n"
    return found[min(found)] if found else None


def names_in(fields: Mapping[str, Any]) -> set[str]:
    """The names of a body's fields, and of the marks inside its messages and functions."""
    text = msgspec.json.encode([fields.get("messages"), fields.get("tools")])
    return set(fields) - ADDED | {name for name in LEFT_OUT_INSIDE if name.encode() in text}
