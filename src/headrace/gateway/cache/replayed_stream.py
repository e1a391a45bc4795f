"""A recorded answer as an upstream gives one: `recorded_prepared` and its stream, so that encoders know no difference."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import islice

from headrace.gateway.cache.recorded_answer import WholeAnswer
from headrace.gateway.upstream.seam import EventStream, OutputEvent, Prepared, PreparedPrompt, TokenUsage

REPLAY_EVENTS = 32
"""Events that a replay gives at a time, each of which becomes a chunk in about 10 us. Other requests have their turn between batches."""


def recorded_prepared(answer: WholeAnswer) -> Prepared:
    """An answer that is there already. Answers with log-probabilities of their prompts are not recorded."""
    usage = answer.token_usage
    return Prepared(
        stream=partial(ReplayedStream, answer),
        prompts=[PreparedPrompt(text, num_tokens) for num_tokens, text in answer.prompts],
        prompt_tokens=usage.prompt_tokens,
        max_prompt_tokens=usage.prompt_tokens,
        max_output_tokens=usage.completion_tokens,
        num_sequences=answer.num_sequences,
        seed=answer.seed,
        ignored=answer.ignored,
    )


class ReplayedStream(EventStream):
    """An answer that no engine computes. A batch has several events of a sequence: the pieces in which the answer came."""

    def __init__(self, answer: WholeAnswer) -> None:
        self._usage = answer.token_usage
        self._events = answer.output_events()
        self._is_begun = False

    async def events(self) -> list[OutputEvent]:
        if self._is_begun:
            await asyncio.sleep(0)
        self._is_begun = True
        return list(islice(self._events, REPLAY_EVENTS))

    def usage(self) -> TokenUsage:
        return self._usage

    def cancel(self) -> None:
        self._events = iter(())
