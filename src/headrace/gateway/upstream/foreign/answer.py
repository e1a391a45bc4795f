"""Works out what the pieces of a foreign server's answer mean together.

Some servers name an end in every piece. So a sequence's end is given when nothing can follow it any more ([DONE], usage by itself, the end
of the body). A named end is sure without any of these where its word is known and no output ever followed it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from headrace.core.plan import TokenLogprobs
from headrace.gateway.upstream.foreign.chunk import (
    AnswerPiece,
    ChosenToken,
    SaidUsage,
    SentCall,
    SentChoice,
    SentDelta,
    SentToken,
    SideField,
    UsageCounts,
)
from headrace.gateway.upstream.foreign.errors import BrokenStream, broken_by, error_in, says_something, sent_error
from headrace.gateway.upstream.foreign.loose_chunks import PieceReader
from headrace.gateway.upstream.foreign.sequence import ForeignFinish, SequenceOutput, ending
from headrace.gateway.upstream.foreign.values import MAX_NAMES_BYTES, NamedTexts
from headrace.gateway.upstream.generation_request import CALL_PASSED, REASONING_PASSED
from headrace.gateway.upstream.seam import OutputEvent, PassedField, TokenUsage
from headrace.text.logprobs import DecodedLogprobs

SPARE_CHOICES = 8

MAX_PASSED_BYTES = 1 << 20


class ForeignAnswer:
    """left: valid at the end, sequences for which the server sent nothing, as one that ignores `n` does"""

    def __init__(self, indices: Sequence[int], call_key: str) -> None:
        self.num_running = len(indices)
        self.left: list[int] = []
        self._outputs = [SequenceOutput(index, f"{call_key}/{index}") for index in indices]
        self._pieces = PieceReader()
        self.left_out = self._pieces.left_out
        self._names = NamedTexts()
        self._num_tokens = 0
        self._said = SaidUsage()
        self._without_choices = b""  # the last piece without choices, which may be an error that does not call itself one
        self._only_index: int | None = None

    @property
    def usage(self) -> TokenUsage:
        return self._said.meant(self._num_tokens, len(self._outputs))

    @property
    def is_running(self) -> bool:
        if not self.num_running or len(self._outputs) == 1:
            return bool(self.num_running)
        is_sure = [output.is_sure for output in self._outputs if output.has_begun]
        return not is_sure or not all(is_sure)

    @property
    def has_usage(self) -> bool:
        return self._said != SaidUsage()

    def read(self, data: bytes, events: list[OutputEvent]) -> None:
        for piece in self._pieces.read(data):
            if piece.is_error:
                raise broken_by(sent_error(data))
            if not piece.choices:
                self._without_choices = data
            self._read_piece(piece, events)

    def read_late_usage(self, data: bytes) -> None:
        with suppress(BrokenStream):
            for piece in self._pieces.read(data):
                if (counts := piece.counts()) is not None:
                    self._said = self._said.merged(counts.said())

    def _read_piece(self, piece: AnswerPiece, events: list[OutputEvent]) -> None:
        choices, num_sequences, num_before = piece.choices or (), len(self._outputs), self._num_tokens
        if len(choices) > 2 * num_sequences + SPARE_CHOICES:
            raise BrokenStream("a piece has too many choices")
        is_listed = len(choices) == num_sequences > 1 and all(each.index is None for each in choices)
        for position, choice in enumerate(choices):
            output = self._outputs[position if is_listed else self._index(choice)]
            if (event := self._event(output, choice)) is not None:
                events.append(event)
        if (counts := piece.counts()) is not None:
            self._count(counts, has_tokens=self._num_tokens > num_before)
            if not choices and not self.num_running:
                self._give_ends(events)

    def end(self, events: list[OutputEvent], *, is_marked: bool, is_document: bool = False) -> None:
        """Raises BrokenStream if one began and has not ended, or if none began.

        is_marked    the server marked the end of the answer ([DONE])
        is_document  the body was one JSON text, whose end is the end of a whole answer
        """
        begun = [output for output in self._outputs if output.has_begun]
        for output in begun or self._outputs:
            if output.ending is None or not (output.is_sure or is_marked or (is_document and output.is_whole)):
                sent = None if self._num_tokens else sent_error(self._without_choices)
                raise BrokenStream("it ended before it was complete", sent=sent)
        self.left = [output.index for output in self._outputs if output not in begun]
        self._give_ends(events)

    def _give_ends(self, events: list[OutputEvent]) -> None:
        for output in self._outputs:
            if output.ending is not None and not output.is_over:
                output.is_over = True
                events.append(output.end(output.ending))

    def _index(self, choice: SentChoice) -> int:
        index = choice.index
        if index is None:
            return 0
        if len(self._outputs) > 1:
            if not 0 <= index < len(self._outputs):
                raise BrokenStream("a choice was not asked for")
            return index
        if index < 0 or (index and self._only_index is None):
            self.left_out[SideField.INDEX] += 1
        if index >= 0:
            if self._only_index not in (None, index):
                raise BrokenStream("a choice was not asked for")
            self._only_index = index
        return 0

    def _event(self, output: SequenceOutput, choice: SentChoice) -> OutputEvent | None:
        """Raises BrokenStream."""
        if choice.error is not None and says_something(choice.error):
            raise broken_by(error_in({"error": choice.error}))
        if choice.message is None and choice.logprobs is None and choice.finish_reason is None:
            delta = choice.delta
            if delta is not None and delta.content and delta.is_text_alone:
                return self._text_event(output, delta.content)
        text, reasoning, pieces = output.added(choice)
        calls = output.calls.read(pieces, [self._passed(output, each, CALL_PASSED) for each in pieces]) if pieces else None
        passed = self._passed(output, choice.delta or choice.message, (*CALL_PASSED, *REASONING_PASSED))
        logprobs = (choice.logprobs and choice.logprobs.content) or ()
        num_tokens = len(logprobs) or (1 if text or reasoning or calls is not None else 0)
        if num_tokens:
            self._note_output(output)
        if choice.finish_reason is not None and (named := ending(choice.finish_reason, choice.stop_reason)) is not None:
            self._note_ending(output, named)
        if not num_tokens and not passed:
            return None
        output.has_tokens = True
        self._num_tokens += num_tokens
        return OutputEvent(
            index=output.index,
            text=output.text.push(text),
            num_tokens=num_tokens,
            logprobs=self._decoded(output, logprobs) if logprobs else (),
            reasoning=output.reasoning.push(reasoning) if reasoning else "",
            tool_calls=calls or (),
            passed=passed,
        )

    def _passed(self, output: SequenceOutput, sent: SentDelta | SentCall | None, names: Sequence[str]) -> tuple[PassedField, ...]:
        fields = []
        for name in names:
            if not (value := getattr(sent, name, None)):
                continue
            try:
                field = PassedField(name, json.dumps(value, allow_nan=False, separators=(",", ":")))
            except ValueError:
                field = None
            output.num_passed_bytes += len(field.json) if field is not None else 0
            if field is None or output.num_passed_bytes > MAX_PASSED_BYTES or output.is_over:
                self.left_out[SideField.SIGNATURE] += 1
            else:
                fields.append(field)
        return tuple(fields)

    def _text_event(self, output: SequenceOutput, text: str) -> OutputEvent:
        self._note_output(output)
        self._num_tokens += 1
        output.said_text.add(text)
        return OutputEvent(output.index, output.text.push(text), 1)

    def _decoded(self, output: SequenceOutput, tokens: Sequence[ChosenToken]) -> tuple[DecodedLogprobs, ...]:
        if self._names.num_bytes > MAX_NAMES_BYTES:
            self._names = NamedTexts()
        decoded, known_bytes = DecodedLogprobs(self._names), self._names.num_bytes
        for token in tokens:
            top = token.top_logprobs or ()
            token_id, *top_ids = [self._names.number(each.token, _raw(each)) for each in (token, *top)]
            decoded.columns.append(TokenLogprobs(token_id, token.logprob, 0, tuple(top_ids), tuple([each.logprob for each in top])))
            decoded.text_offsets.append(output.num_logprob_chars)
            decoded.visible.append(True)
            output.num_logprob_chars += len(token.token)
        return (replace(decoded, texts_bytes=self._names.num_bytes - known_bytes),)

    def _note_output(self, output: SequenceOutput) -> None:
        """Raises BrokenStream if the client was given the end already."""
        if output.is_over:
            raise BrokenStream("it went on after its end")
        output.has_tokens = True
        if output.ending is not None:
            self.num_running += output.is_sure
            output.is_sure, output.is_revoked = False, True

    def _note_ending(self, output: SequenceOutput, named: ForeignFinish) -> None:
        if output.is_over or (output.ending is not None and output.ending.is_known and not named.is_known):
            return
        output.ending = named
        if named.is_known and not output.is_revoked:
            self._make_sure(output)

    def _make_sure(self, output: SequenceOutput) -> None:
        if not output.is_sure:
            output.is_sure = True
            self.num_running -= 1

    def _count(self, counts: UsageCounts, *, has_tokens: bool) -> None:
        """Counts make a named end sure. Some servers send them with every piece, so beside output they do not make sure an end that output
        followed, or an unknown word.
        """
        self._said = self._said.merged(counts.said())
        for output in self._outputs:
            if output.ending is not None and not (has_tokens and (output.is_revoked or not output.ending.is_known)):
                self._make_sure(output)


def _raw(token: SentToken) -> bytes:
    return bytes(token.bytes) if token.bytes is not None else token.token.encode()
