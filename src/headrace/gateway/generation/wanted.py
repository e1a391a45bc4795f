"""A prepared request whose prompts' entries end with the client: an answer reads one entry per prompt token, up to a million.

Encoding runs in a thread, where cancelling does not reach; what it reads does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.core.plan import TokenLogprobs
from headrace.gateway.upstream.seam import EventStream, Prepared, PreparedPrompt
from headrace.text.assemble import TokenEntry


@dataclass(frozen=True, slots=True)
class WantedPrompt:
    """raise_if_left: called before each entry"""

    inner: PreparedPrompt
    raise_if_left: Callable[[], None]

    @property
    def num_tokens(self) -> int | None:
        return self.inner.num_tokens

    @property
    def text(self) -> str:
        return self.inner.text

    def entries(self, scores: Sequence[TokenLogprobs]) -> Iterator[TokenEntry]:
        for entry in self.inner.entries(scores):
            self.raise_if_left()
            yield entry


class WantedPrepared:
    """As the `Prepared` in it, but for its prompts."""

    def __init__(self, inner: Prepared, raise_if_left: Callable[[], None]) -> None:
        self._inner = inner
        self.prompts: Sequence[PreparedPrompt] = [WantedPrompt(prompt, raise_if_left) for prompt in inner.prompts]

    @property
    def prompt_tokens(self) -> int | None:
        return self._inner.prompt_tokens

    @property
    def max_output_tokens(self) -> int | None:
        return self._inner.max_output_tokens

    @property
    def num_sequences(self) -> int:
        return self._inner.num_sequences

    @property
    def route_key(self) -> bytes:
        return self._inner.route_key

    @property
    def seed(self) -> int | None:
        return self._inner.seed

    def stream(self) -> EventStream:
        return self._inner.stream()
