"""What the pieces of a foreign server's answer mean together: which sequence each belongs to, what it adds, when each sequence has ended.

A sequence's end is given when nothing can follow it any more ([DONE], usage by itself, the end of the body), since some servers name an end
in every piece. It is sure without any of these where its word is known and was never followed by output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headrace.core.finish import FinishReason
from headrace.gateway.upstream.foreign_calls import CallPieces
from headrace.gateway.upstream.foreign_chunk import SentCall, SentChoice, SentDelta, SideField, UsageCounts
from headrace.gateway.upstream.foreign_errors import BrokenStream, sent_error
from headrace.gateway.upstream.foreign_finish import Ending, ending
from headrace.gateway.upstream.foreign_json import SplitText
from headrace.gateway.upstream.foreign_logprobs import LogprobReader
from headrace.gateway.upstream.foreign_loose import PieceReader
from headrace.gateway.upstream.output_events import OutputEvent, TokenUsage

_NOTHING_NEW = SentDelta()


class _Output:
    """One sequence so far.

    has_tokens  any output was given
    has_text, has_reasoning, has_calls  deltas gave it: a message that comes too says it again
    is_whole    all of it came as one message, which a server writes at the end
    ending      the end that the server named last
    is_sure     nothing else has to say that this is the end;  is_revoked: output followed an end;  is_over: the end was given
    """

    __slots__ = (
        *("index", "text", "reasoning", "calls", "has_tokens", "has_text", "has_reasoning", "has_calls"),
        *("ending", "is_whole", "is_sure", "is_revoked", "is_over"),
    )

    def __init__(self, index: int, call_key: str) -> None:
        self.index = index
        self.text, self.reasoning, self.calls = SplitText(), SplitText(), CallPieces(call_key)
        self.has_tokens = self.has_text = self.has_reasoning = self.has_calls = False
        self.ending: Ending | None = None
        self.is_whole = self.is_sure = self.is_revoked = self.is_over = False

    def added(self, choice: SentChoice) -> tuple[str, str, Sequence[SentCall]]:
        """Text, reasoning and pieces of calls that a choice adds: those of its delta, and what its message has and no delta gave."""
        delta, message = choice.delta or _NOTHING_NEW, choice.message
        text, reasoning, calls = delta.content or delta.refusal or choice.text or "", delta.any_reasoning, delta.calls
        self.has_text = self.has_text or text != ""
        self.has_reasoning = self.has_reasoning or reasoning != ""
        self.has_calls = self.has_calls or bool(calls)
        if message is None:
            return text, reasoning, calls
        self.is_whole = choice.delta is None and not self.has_tokens
        return (
            text if self.has_text else message.content or message.refusal or "",
            reasoning if self.has_reasoning else message.any_reasoning,
            calls if self.has_calls else message.calls,
        )

    def end(self, end: Ending) -> OutputEvent:
        """The last event. Raises BrokenStream for a call without a name."""
        is_cut = (end.stop_reason is not None or end.is_filtered) and not end.is_called and self.calls.is_open
        return OutputEvent(
            index=self.index,
            text=self.text.rest(),
            finish=end.finish,
            stop_reason=end.stop_reason,
            reasoning=self.reasoning.rest(),
            tool_calls=self.calls.finish(is_whole=end.finish is FinishReason.STOP and not is_cut),
            is_call_cut=is_cut,
            is_filtered=end.is_filtered,
        )


class ForeignAnswer:
    """One answer.

    num_running  sequences whose end is not sure
    """

    def __init__(self, num_sequences: int, call_key: str) -> None:
        """call_key: what distinguishes this answer's calls from all others, see `CallPieces`"""
        self.num_running = num_sequences
        self._outputs = [_Output(index, f"{call_key}/{index}") for index in range(num_sequences)]
        self._pieces = PieceReader()
        self._logprobs = LogprobReader(num_sequences)
        self._num_tokens = 0
        self._counted = TokenUsage(0, 0, 0)
        self._is_counted_to_end = False

    @property
    def usage(self) -> TokenUsage:
        """The server's counts, as far as it has sent them; else output tokens as received, and 0 for the prompt."""
        return self._counted._replace(completion_tokens=self._counted.completion_tokens or self._num_tokens)

    @property
    def left_out(self) -> Counter[SideField]:
        """What was malformed beside the answer and could not be used, counted."""
        return self._pieces.left_out

    def read(self, data: bytes, events: list[OutputEvent]) -> None:
        """Add the events of one piece. Raises BrokenStream."""
        piece = self._pieces.read(data)
        if piece.is_error:
            raise sent_error(data)
        choices, num_before = piece.choices or (), self._num_tokens
        for position, choice in enumerate(choices):
            output = self._outputs[self._index(choice, position, choices)]
            if (event := self._event(output, choice)) is not None:
                events.append(event)
        has_tokens = self._num_tokens > num_before
        if (counts := piece.counts()) is not None:
            self._count(counts, has_tokens=has_tokens)
            if not choices and not self.num_running:
                self._give_ends(events)
        elif has_tokens:
            self._is_counted_to_end = False

    def end(self, events: list[OutputEvent], *, is_marked: bool) -> None:
        """Add the ends of all sequences. is_marked: the server said that the answer ends here

        A sequence whose end was not named has ended where the server says so twice: by the mark, and by usage after the last token.
        Raises BrokenStream where one has not ended.
        """
        for output in self._outputs:
            is_marked_here = is_marked or output.is_whole
            if output.ending is None and is_marked_here and output.has_tokens and self._is_counted_to_end:
                output.ending = Ending(FinishReason.STOP)
            if output.ending is None or not (output.is_sure or is_marked_here):
                raise BrokenStream("it ended before it was complete")
        self._give_ends(events)

    def _give_ends(self, events: list[OutputEvent]) -> None:
        for output in self._outputs:
            if output.ending is not None and not output.is_over:
                output.is_over = True
                events.append(output.end(output.ending))

    def _index(self, choice: SentChoice, position: int, choices: Sequence[SentChoice]) -> int:
        """The sequence of a choice. One that has no number is the only sequence, or is named by its place, or is the first."""
        index, num_sequences = choice.index, len(self._outputs)
        if index is None:
            is_listed = len(choices) == num_sequences and all(each.index is None for each in choices)
            return position if is_listed else 0
        if num_sequences == 1 and index < 0:
            self.left_out[SideField.INDEX] += 1
            return 0
        if not 0 <= index < num_sequences:
            raise BrokenStream("a choice was not asked for")
        return index

    def _event(self, output: _Output, choice: SentChoice) -> OutputEvent | None:
        """What a choice adds. None for nothing, such as in the one that names the role before the first token."""
        text, reasoning, pieces = output.added(choice)
        calls = output.calls.read(pieces) if pieces else ()
        logprobs = (choice.logprobs and choice.logprobs.content) or ()
        num_tokens = len(logprobs) or (1 if text or reasoning or calls else 0)
        if num_tokens:
            self._go_on(output)
        if choice.finish_reason is not None and (named := ending(choice.finish_reason, choice.stop_reason)) is not None:
            self._note_ending(output, named)
        if not num_tokens:
            return None
        self._num_tokens += num_tokens
        return OutputEvent(
            index=output.index,
            text=output.text.push(text),
            num_tokens=num_tokens,
            logprobs=self._logprobs.read(output.index, logprobs) if logprobs else (),
            reasoning=output.reasoning.push(reasoning) if reasoning else "",
            tool_calls=calls,
        )

    def _go_on(self, output: _Output) -> None:
        """Note that there is output. Raises BrokenStream where the end was given already: it must not be lost silently."""
        if output.is_over:
            raise BrokenStream("it went on after its end")
        output.has_tokens = True
        if output.ending is not None:
            self.num_running += output.is_sure
            output.is_sure, output.is_revoked = False, True

    def _note_ending(self, output: _Output, named: Ending) -> None:
        """Note a named end. A word that is not known takes the place of none that is."""
        if output.is_over or (output.ending is not None and output.ending.is_known and not named.is_known):
            return
        output.ending = named
        if named.is_known and not output.is_revoked:
            self._make_sure(output)

    def _make_sure(self, output: _Output) -> None:
        if not output.is_sure:
            output.is_sure = True
            self.num_running -= 1

    def _count(self, counts: UsageCounts, *, has_tokens: bool) -> None:
        """Note the server's counts. They show that an end which was named is one; of ends before output, only where they come alone."""
        known, details = self._counted, counts.prompt_tokens_details
        self._counted = TokenUsage(
            prompt_tokens=known.prompt_tokens if counts.num_prompt is None else counts.num_prompt,
            completion_tokens=known.completion_tokens if counts.num_completion is None else counts.num_completion,
            cached_tokens=(details and details.cached_tokens) or 0,
            reasoning_tokens=(counts.completion_tokens_details and counts.completion_tokens_details.reasoning_tokens) or 0,
        )
        self._is_counted_to_end = True
        for output in self._outputs:
            if output.ending is not None and not (output.is_revoked and has_tokens):
                self._make_sure(output)
