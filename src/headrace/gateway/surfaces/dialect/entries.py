"""Log-probabilities of an answer that is not written yet, as flat columns: a twentieth of what the objects take that they come as."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from headrace.text.assemble import TokenEntry, TopToken

Name = tuple[int, str, bytes]
"""Token id, text, exact bytes."""


class TokenNames:
    """Each token that occurs, named once: shared by the sequences of an answer, whose tokens are much the same ones."""

    __slots__ = ("_numbers", "names")

    def __init__(self) -> None:
        self._numbers: dict[Name, int] = {}
        self.names: list[Name] = []

    def number(self, token_id: int, token: str, raw: bytes) -> int:
        name = (token_id, token, raw)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number


class EntryColumns:
    """One sequence's entries. Iterating makes the objects again, one at a time, equal to those that were added."""

    __slots__ = ("_counts", "_facts", "_logprobs", "_names", "_tops", "_visible")

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._facts = array("q")  # per entry: number of its name, rank, text offset
        self._counts = array("i")
        self._visible = bytearray()
        self._logprobs = array("d")  # per entry: its own, then its alternatives'
        self._tops = array("i")  # numbers of the alternatives' names

    def __len__(self) -> int:
        return len(self._counts)

    def extend(self, entries: Iterable[TokenEntry]) -> None:
        for entry in entries:
            self._facts.extend((self._names.number(entry.token_id, entry.token, entry.raw), entry.rank, entry.text_offset))
            self._counts.append(len(entry.top))
            self._visible.append(entry.is_visible)
            self._logprobs.append(entry.logprob)
            self._logprobs.extend([top.logprob for top in entry.top])
            self._tops.extend([self._names.number(top.token_id, top.token, top.raw) for top in entry.top])

    def __iter__(self) -> Iterator[TokenEntry]:
        names, logprobs, begin = self._names.names, self._logprobs, 0
        for place, count in enumerate(self._counts):
            number, rank, offset = self._facts[3 * place : 3 * place + 3]
            at = begin + place  # each entry before this one had a logprob of its own
            top = tuple(
                TopToken(*names[self._tops[begin + i]], logprobs[at + 1 + i])
                for i in range(count)
            )  # fmt: skip
            token_id, token, raw = names[number]
            yield TokenEntry(token_id, token, raw, logprobs[at], rank, top, offset, bool(self._visible[place]))
            begin += count
