"""Keeps the output of a call whose client leaves, so that a later stream of the same request can go on from it.

Token ids, ends, and the state of the random numbers are kept here. `generation.kept_streams` keeps the answer's events, and checks a
request before its client gets them. docs/failover.md has the rules, in "A client that comes back".
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from msgspec import Struct

from headrace.core.finish import FinishReason
from headrace.core.ids import RequestId
from headrace.core.plan import TokenLogprobs
from headrace.core.update import SequenceUpdate

ID_TYPE = "i"
"""Element type of kept token ids: four bytes each."""


class EarlierSequence(Struct, array_like=True, frozen=True):
    """output_ids: every id that was read, as bytes of ID_TYPE;  finish, stop_token_id: the engine's; None: it has not ended the sequence"""

    output_ids: bytes
    finish: str | None = None
    stop_token_id: int | None = None


class EarlierCallOutput(Struct, array_like=True, frozen=True):
    """The output of one prompt.

    prompt_digest       digest of the prompt's ids: a template may write today's date, so that the same request has another prompt
    numerics            numerics of the replica that computed the output
    num_counted_tokens  output tokens that the requests so far were charged for; 0: written by a version without this field
    """

    seed: int
    prompt_digest: bytes
    numerics: dict[str, str]
    num_cached_tokens: int | None
    sequences: tuple[EarlierSequence, ...]
    num_counted_tokens: int = 0

    def up_to(self, offsets: Sequence[int]) -> EarlierCallOutput:
        """The output with each sequence cut at an offset (`OutputEvent.offset`)."""
        return msgspec.structs.replace(self, sequences=tuple(map(_cut, self.sequences, offsets)))


def _cut(sequence: EarlierSequence, offset: int) -> EarlierSequence:
    kept_bytes = offset * array(ID_TYPE).itemsize
    return sequence if kept_bytes > len(sequence.output_ids) else EarlierSequence(sequence.output_ids[:kept_bytes])


calls_of = msgspec.msgpack.Decoder(tuple[EarlierCallOutput, ...]).decode
"""The calls of a state. Raises msgspec.DecodeError for what another version wrote in another form."""


def state_of(*calls: EarlierCallOutput) -> bytes:
    """Calls encoded for `EventStream.saved_state`."""
    return msgspec.msgpack.encode(calls)


def joined_states(states: Sequence[bytes | None]) -> bytes | None:
    """One state of the states of a request's calls; None if one of the calls cannot be continued."""
    if None in states:
        return None
    return state_of(*[call for state in states if state is not None for call in calls_of(state)])


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    return blake2b(array(ID_TYPE, prompt_ids).tobytes(), digest_size=16).digest()


class EarlierUpdates:
    """Gives one call's earlier output as updates. The first update of sequence 0 has the number of cached prompt tokens."""

    def __init__(self, call: EarlierCallOutput, request_id: RequestId) -> None:
        self._request_id = request_id
        self._call = call
        self._ids = [array(ID_TYPE, sequence.output_ids) for sequence in call.sequences]
        self._offsets = [0] * len(call.sequences)

    def take(self, index: int, offset: int | None = None) -> SequenceUpdate:
        """A sequence's output from the previous offset up to `offset`; None: the rest."""
        sequence, ids, begin = self._call.sequences[index], self._ids[index], self._offsets[index]
        end = len(ids) if offset is None else min(offset, len(ids))
        finish = sequence.finish if (offset is None or offset > len(ids)) and begin <= len(ids) else None
        self._offsets[index] = end if finish is None else end + 1
        return SequenceUpdate(
            request_id=self._request_id,
            epoch=0,
            index=index,
            token_ids=tuple(ids[begin:end]),
            finish=None if finish is None else FinishReason(finish),
            stop_token_id=None if finish is None else sequence.stop_token_id,
            num_cached_tokens=self._call.num_cached_tokens if index == 0 and begin == 0 else None,
        )


@dataclass(slots=True)
class RecomputedLogprobs:
    """Collects log-probabilities of ids that were read earlier and are computed again, since ids are kept without them.

    ids    ids of the tokens in order whose text was held back when the client stopped reading
    found  their log-probabilities so far
    """

    ids: Sequence[int]
    found: list[TokenLogprobs]

    @property
    def is_complete(self) -> bool:
        return len(self.found) == len(self.ids)

    def take(self, update: SequenceUpdate) -> SequenceUpdate | None:
        """Take log-probabilities from an update. Returns the rest of the update; None: its tokens differ from `ids`, or are too few."""
        count = min(len(self.ids) - len(self.found), len(update.token_ids))
        begin = len(self.found)
        is_equal = tuple(self.ids[begin : begin + count]) == update.token_ids[:count]
        self.found.extend(update.logprobs[:count])
        if not is_equal or (update.finish is not None and not self.is_complete):
            return None
        return update._replace(token_ids=update.token_ids[count:], logprobs=update.logprobs[count:])
