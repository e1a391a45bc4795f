"""Numbers for what a foreign server names otherwise: tokens by their texts, tool calls by ids and by indices that may be wrong."""

from __future__ import annotations

from headrace.gateway.upstream.generation_request import string_bytes

NAME_BYTES = 200
"""Memory of one token name without its text and its bytes."""


class NamedTexts:
    """Gives token ids to tokens that the server names by text alone. A `TokenTexts`. num_bytes: memory of the table"""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._names: list[tuple[str, bytes]] = []

    def number(self, token: str, raw: bytes) -> int:
        name = (token, raw)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
            self.num_bytes += NAME_BYTES + string_bytes(token) + len(raw)
        return number

    def token_text(self, token_id: int) -> str:
        return self._names[token_id][0]

    def token_bytes(self, token_id: int) -> bytes:
        return self._names[token_id][1]


class CallNumbers:
    """Numbers the calls of one sequence. Some servers, Ollama among them, give all parallel calls the index 0: a piece with a name and
    another id begins a further call. A new id alone does not: vLLM once drew one for every piece.
    """

    def __init__(self) -> None:
        self._ids: list[str | None] = []
        self._numbers: dict[int, int] = {}

    def number(self, index: int, call_id: str | None, name: str | None) -> int:
        number = self._numbers.get(index)
        if number is None or (name and call_id and self._ids[number] not in (None, call_id)):
            number = self._numbers[index] = len(self._ids)
            self._ids.append(call_id)
        return number
