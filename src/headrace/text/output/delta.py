"""Describes what a parser emits: pieces of content, of reasoning and of tool calls, in the order of the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class CallPiece(NamedTuple):
    """A piece of a tool call.

    number     of the call within the output, from 0
    name       with the call's first piece; None in later ones
    arguments  text to append to the call's arguments; all pieces joined are the arguments as the model wrote them
    """

    number: int
    name: str | None
    arguments: str


class ParsedDelta(NamedTuple):
    """The new part of a parsed output. All deltas joined depend on the whole text alone, not on how it was split."""

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[CallPiece] = ()
