"""Writes the body of a request for one foreign server, in a form that the server takes.

A server may refuse a field that says nothing about the answer, such as `stream_options`, or know `max_tokens` by one of its two names only,
or give one choice whatever `n` says. It is asked again in another form. `ForeignServer` keeps that form for later requests once an answer
came in it, if the server does not know the field's name (`field_errors`): a value that it refuses is one client's. A field that
does say something about the answer is never left out: the client gets its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.ids import RequestId
from headrace.core.sampling import MAX_SEED
from headrace.gateway.upstream.foreign.field_errors import LEFT_OUT_INSIDE, LIMITS, Refusal
from headrace.gateway.upstream.generation_request import PASSED_IN_BODY, PASSED_IN_CHAT, names_inside, without

WITHOUT_MEANING = frozenset(("stream_options", *PASSED_IN_BODY, *PASSED_IN_CHAT))
"""Fields of a body that are not about the answer."""

_MARKED = ("messages", "tools")

SALT = "cache_salt"

ADDED = frozenset(("model", "stream", SALT))
"""Fields that a client did not write."""

MAX_ADAPTATIONS = 3
"""Most times that a request is written in another form for one server."""


@dataclass(slots=True, kw_only=True)
class ForeignRequest:
    """A request in OpenAI's form, for any of the model's servers.

    fields        the body without the fields that differ between servers
    salt          the tenant's salt
    is_one_by_one  a server refused `n` in this request, or left choices out; its other sequences are asked for one by one
    """

    request_id: RequestId
    path: str
    fields: dict[str, Any]
    salt: bytes
    num_prompts: int
    num_sequences: int
    is_one_by_one: bool = False

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
        return indices[:1] if self.is_one_by_one or (takes_one_prompt if self._n == 1 else "n" in refused) else indices


def written(fields: Mapping[str, Any], refused: Collection[str]) -> dict[str, Any]:
    """The fields in a form without those that the server refuses. The limit of tokens is written by its other name."""
    made = {name: value for name, value in fields.items() if name not in refused or name not in WITHOUT_MEANING}
    if made.get("n") == 1 or "n" in refused:
        made.pop("n", None)
    for name, other in (LIMITS, LIMITS[::-1]):
        if name in refused and name in made:
            made[other] = made.pop(name)
            break
    for place in _MARKED:
        if (marks := {name for name in LEFT_OUT_INSIDE if f"{place}.{name}" in refused}) and place in made:
            made[place] = without(made[place], marks)
    return made


def refuse(refused: set[str], name: str) -> None:
    """Note that a server refuses a field. It takes at least one name of the limit."""
    if name in LIMITS:
        refused.difference_update(LIMITS)
    refused.add(name)


def is_adaptable(refusal: Refusal, tried: Collection[Refusal]) -> bool:
    """Whether a request in another form asks for the same answer, perhaps in several requests. tried: refusals of the request before

    A limit that is too large stays what it is: a server that ignores the other name would give a longer answer.
    """
    names = {each.field for each in tried}
    if len(tried) == MAX_ADAPTATIONS:
        return False
    if refusal.field in LIMITS:
        return refusal.is_name and names.isdisjoint(LIMITS)
    is_mark = refusal.field.startswith(tuple(f"{place}." for place in _MARKED))
    may_go = is_mark or refusal.field in WITHOUT_MEANING or refusal.field == "n"
    return may_go and refusal.field not in names


def names_in(fields: Mapping[str, Any]) -> set[str]:
    """The names of a body's fields, and of the marks inside its messages and functions with their place: `messages.cache_control`."""
    marks = {f"{place}.{name}" for place in _MARKED for name in LEFT_OUT_INSIDE & names_inside(fields.get(place))}
    return set(fields) - ADDED | marks
