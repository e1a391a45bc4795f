"""Defines the interface between the HTTP surfaces and the upstreams that answer requests (`Upstream`, `EventStream`): types only.

    validated request + facts of its key --Upstream.prepare--> Prepared (counts, to decide on) --stream--> EventStream --> OutputEvents

`own` answers by Headrace's engines, `foreign` by OpenAI-compatible servers.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import Any, NamedTuple, Protocol

from headrace.core.errors import Unavailable
from headrace.core.load import AttemptCounts, LoadSnapshot
from headrace.core.plan import LogprobColumns
from headrace.core.request import PriorityClass
from headrace.core.update import FinishReason, MissReason, StageSeconds
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts, PrincipalFacts, string_bytes
from headrace.observe.finished_request import AnswerHandling
from headrace.policy.admission import QueueState, UnsentRequest, UnsentRequests
from headrace.policy.holding import HeldTerms
from headrace.policy.routing.wishes import OWN_ENGINES, RoutingWishes
from headrace.text.logprobs import DecodedLogprobs

TOOL_CALL_BYTES = 256

PASSED_FIELD_BYTES = 128

CALL_ID_CHARS = 24


def made_call_id(call_key: str, number: int, num_chars: int | None = None) -> str:
    """num_chars: length that the format requires"""
    digest = blake2b(f"{call_key}/{number}".encode()).hexdigest()
    return digest[:num_chars] if num_chars else f"call_{digest[:CALL_ID_CHARS]}"


class PassedField(NamedTuple):
    """A field of a foreign server's answer that clients send back unchanged. json: ASCII"""

    name: str
    json: str


def passed_bytes(fields: Sequence[PassedField]) -> int:
    return sum([PASSED_FIELD_BYTES + len(each.json) for each in fields])


def joined_values(fields: Iterable[PassedField]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, text in fields:
        value, before = json.loads(text), made.get(name)
        if isinstance(value, list) and isinstance(before, list):
            before += value  # in place: an answer may have a piece for each token
        elif isinstance(value, dict) and isinstance(before, dict):
            before |= value
        else:
            made[name] = value
    return made


class ToolCall(NamedTuple):
    number: int
    call_id: str | None
    name: str | None
    arguments: str
    passed: Sequence[PassedField] = ()

    @property
    def num_bytes(self) -> int:
        num_bytes = TOOL_CALL_BYTES + sum([string_bytes(text) for text in (self.call_id or "", self.name or "", self.arguments)])
        return num_bytes + passed_bytes(self.passed) if self.passed else num_bytes

    @classmethod
    def joined(cls, pieces: Sequence[ToolCall]) -> ToolCall:
        call_id = next((piece.call_id for piece in pieces if piece.call_id), None)
        name = next((piece.name for piece in pieces if piece.name), None)
        passed = tuple([field for piece in pieces for field in piece.passed])
        return cls(pieces[0].number, call_id, name, "".join([piece.arguments for piece in pieces]), passed)


class OutputEvent(NamedTuple):
    """index            number of the sequence in the request: sequence i of prompt p is p * n + i
    offset           output ids of the sequence read so far, plus one once it has ended; only from our engines
    prompt_logprobs  pages of prompt positions 1.. in order, over one or more events; `PreparedPrompt.decoded_logprobs` adds the texts
    finish           set exactly once, on the sequence's last event
    stop_reason      beside FinishReason.STOP: the stop string or stop token id; None for the model's own end token
    error            beside FinishReason.ERROR: message for the operator
    is_call_cut      the client's stop ended the output inside a call's arguments
    is_filtered      a foreign provider's moderation ended the output
    """

    index: int  # type: ignore[assignment]  # hides a tuple's search, which means nothing here
    text: str = ""
    num_tokens: int = 0
    offset: int = 0
    logprobs: Sequence[DecodedLogprobs] = ()
    prompt_logprobs: Sequence[LogprobColumns] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    is_call_cut: bool = False
    is_filtered: bool = False
    passed: Sequence[PassedField] = ()

    @property
    def text_bytes(self) -> int:
        text = self.text
        num_bytes = len(text) if text.isascii() else string_bytes(text)  # nearly every event: once per token
        if self.reasoning or self.tool_calls:
            num_bytes += string_bytes(self.reasoning) + sum([call.num_bytes for call in self.tool_calls])
        if self.passed:
            num_bytes += passed_bytes(self.passed)
        if self.error is not None:
            num_bytes += string_bytes(self.error)
        if self.stop_reason is not None and isinstance(self.stop_reason, str):
            num_bytes += string_bytes(self.stop_reason)
        return num_bytes

    @property
    def num_bytes(self) -> int:
        """With the output's log-probabilities. Those of the prompt are charged before the request runs."""
        num_bytes = self.text_bytes
        if self.logprobs:
            num_bytes += sum([part.num_bytes for part in self.logprobs])
        return num_bytes

    @property
    def num_logprob_tokens(self) -> int:
        return sum([len(part) for part in self.logprobs])

    @classmethod
    def joined(cls, events: Sequence[OutputEvent]) -> OutputEvent:
        last = events[-1]
        if len(events) == 1:
            return last
        return cls(
            last.index,
            "".join([event.text for event in events]),
            sum([event.num_tokens for event in events]),
            last.offset,
            tuple([part for event in events for part in event.logprobs]),
            tuple([page for event in events for page in event.prompt_logprobs]),
            last.finish,
            last.stop_reason,
            last.error,
            "".join([event.reasoning for event in events]),
            tuple([call for event in events for call in event.tool_calls]),
            last.is_call_cut,
            last.is_filtered,
            tuple([field for event in events for field in event.passed]),
        )


def merged(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    by_sequence: dict[int, list[OutputEvent]] = {}
    for event in events:
        by_sequence.setdefault(event.index, []).append(event)
    return [OutputEvent.joined(of_one) for of_one in by_sequence.values()]


class TokenUsage(NamedTuple):
    """Tokens that a request has used so far. A prompt counts once for all sequences that continue it, or as often as it was sent. The
    earlier_ counts are parts that were counted for the earlier request whose stream this one continues.

    num_uncounted_prompts  that a foreign server has not counted (yet), see `Prepared.counted`
    estimated_tokens       of the prompts' and the completion's, those that no server counted
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    earlier_tokens: int = 0
    earlier_prompt_tokens: int = 0
    num_uncounted_prompts: int = 0
    estimated_tokens: int = 0

    @property
    def charged(self) -> TokenUsage:
        prompt_tokens = self.prompt_tokens - self.earlier_prompt_tokens
        completion_tokens, cached_tokens = self.completion_tokens - self.earlier_tokens, min(self.cached_tokens, prompt_tokens)
        return TokenUsage(prompt_tokens, completion_tokens, cached_tokens, estimated_tokens=self.estimated_tokens)


NO_USAGE = TokenUsage(0, 0, 0)


def added(*usages: TokenUsage) -> TokenUsage:
    return TokenUsage(*[sum(column) for column in zip(*usages, strict=True)])


class ReplicaLost(Unavailable):
    """The replica of a running stream was lost. No other replica continued the stream in time. why_not_resume: empty: one may, but did not
    take it in time
    """

    def __init__(self, message: str, *, why_not_resume: str) -> None:
        self.why_not_resume = why_not_resume
        super().__init__(message)


class EventListener(Protocol):
    """Receives a stream's events while the consumer task waits in `events`, without waking the task."""

    @property
    def has_room(self) -> bool: ...

    def take(self, events: Sequence[OutputEvent]) -> None: ...


class CacheMiss(NamedTuple):
    """Why no more of a prompt was cached. at_token: the first position that was not, where a block begins; `PreparedPrompt.part_at` names
    its place
    """

    at_token: int
    reason: MissReason


class SequenceFacts(NamedTuple):
    """None where the engine has not reported them, or (queue_time_s, stages) a stop string ended the sequence in the gateway"""

    replica: str | None = None
    queue_time_s: float | None = None
    stages: StageSeconds | None = None
    cache_miss: CacheMiss | None = None


class EventStream(ABC):
    """An open request. Ends after the last sequence's finish, or when cancelled."""

    @property
    def unread_bytes(self) -> int:
        return 0

    @property
    def num_resumes(self) -> int:
        return 0

    @abstractmethod
    async def events(self) -> list[OutputEvent]:
        """Wait for new events, one per sequence that is being computed; empty: the stream has ended.

        Raises ReplicaLost, or the error of a rejected request.
        """

    def listen(self, listener: EventListener | None) -> None:
        """Let the stream give plain events (no log-probabilities, no error) to `listener` while the consumer task waits in `events`, in the
        same order. May be ignored.
        """
        return

    @abstractmethod
    def usage(self) -> TokenUsage: ...

    def facts(self, index: int) -> SequenceFacts:
        return SequenceFacts()

    def handling(self) -> AnswerHandling:
        """After `close`."""
        return AnswerHandling()

    def saved_state(self) -> bytes | None:
        """The state from which a later stream can continue (`EarlierOutput`), also after `cancel`. None: it cannot be continued."""
        return None

    def replay(self, index: int, offset: int) -> OutputEvent:
        """The event with a sequence's earlier output from the previous call's offset up to `offset`, without log-probabilities.
        Called on a continued stream, before its first `events`.
        """
        raise AssertionError("a stream that keeps no events is never continued")

    @abstractmethod
    def cancel(self) -> None:
        """May be called at any time, more than once."""

    async def close(self) -> None:
        """`cancel`, and wait until no task of the stream runs any more."""
        self.cancel()


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    text: str
    num_tokens: int | None = None

    def recorded_blocks(self, key: bytes) -> str:
        """See `core.hashing`; empty where the gateway does not know the tokens."""
        return ""

    def part_at(self, position: int) -> str | None:
        """Where the block that begins at this token stands in the request: "messages[3]", "messages[3] to messages[4]". None: not known"""
        return None

    def decoded_logprobs(self, logprobs: LogprobColumns) -> Iterator[DecodedLogprobs]:
        """Pages of the prompt's tokens. A page may be empty, so that long work can pause. The first token, which has no probability (rank
        0), is a page by itself.

        logprobs  of positions 1.. in order, from `OutputEvent.prompt_logprobs`
        """
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that its upstream can run. Nothing runs yet.

    stream             opens the stream; the first call of its `events` submits the request
    max_prompt_tokens  upper bound of `prompt_tokens`; equal to it if it is known
    num_prompt_copies  times that each prompt is sent: one request at a time asks a server that ignores `n` for one sequence
    keeps_events       the stream's events can be made again from `EventStream.saved_state`
    """

    stream: Callable[[], EventStream]
    prompts: Sequence[PreparedPrompt]
    prompt_tokens: int | None
    max_prompt_tokens: int
    max_output_tokens: int | None
    num_sequences: int
    seed: int | None
    ignored: Sequence[str] = ()
    taken: Collection[str] = ()
    keeps_events: bool = False
    num_prompt_copies: int = 1

    def counted(self, usage: TokenUsage) -> TokenUsage:
        """The usage of its stream, with each uncounted prompt as it was reserved."""
        if not usage.num_uncounted_prompts:
            return usage
        estimated = ceil(usage.num_uncounted_prompts * self.max_prompt_tokens / max(1, len(self.prompts)))
        return usage._replace(
            prompt_tokens=usage.prompt_tokens + estimated,
            num_uncounted_prompts=0,
            estimated_tokens=usage.estimated_tokens + estimated,
        )


class Tokenization(NamedTuple):
    """JSON. texts_json: as the vocabulary spells them; null if not asked for"""

    num_tokens: int
    ids_json: bytes
    texts_json: bytes


@dataclass(frozen=True, slots=True)
class ReplicaHealth:
    """The state of one replica or foreign server, now.

    is_asleep   that is the reason, and nothing worse
    is_foreign  a foreign server: its state is shown, and it counts as ready for /ready
    is_failing  the circuit is open: requests failed lately, and new ones are sent only if no other replica is left
    attempts    grow with it; None of a foreign server
    block_size  of its KV blocks; 0: not known
    """

    name: str
    is_connected: bool
    reason: str
    load: LoadSnapshot | None = None
    load_age_s: float = 0.0
    is_asleep: bool = False
    is_foreign: bool = False
    num_open: int = 0
    has_tried: bool = True
    is_failing: bool = False
    attempts: AttemptCounts | None = None
    block_size: int = 0

    @property
    def is_missing(self) -> bool:
        """One that is asleep is not: it wakes for a request."""
        return bool(self.reason) and not self.is_foreign and not self.is_asleep


class Hold(NamedTuple):
    """A request's place among those that wait for a replica. The caller must call `leave` at the end of its wait.

    released  raises Unavailable where no replica comes, or the place is given to another request
    """

    released: asyncio.Future[None]
    limit_s: float
    leave: Callable[[], None]


class Upstream(ABC):
    def hold(self, terms: Callable[[], HeldTerms], unsent: UnsentRequest | None, wishes: RoutingWishes) -> Hold | None:
        """None: the request need not wait for a replica of ours, or none would come. Raises Unavailable where too many wait."""
        return None

    def note_wanted(self) -> None:
        """A request for it does not wait: something else may answer."""
        return

    @property
    def num_held(self) -> int:
        return 0

    @property
    def is_asleep(self) -> bool:
        """There is no replica, and a request starts one."""
        return False

    def queue(self, priority: PriorityClass, unsent: UnsentRequests) -> QueueState | None:
        """`unsent` requests included. None: not known"""
        return None

    def is_queue_first(self, wishes: RoutingWishes) -> bool:
        """False: other servers are asked alone, or before those of the queue."""
        return True

    @property
    def server_names(self) -> Sequence[str]:
        """The names by which a request may choose among what answers."""
        return (OWN_ENGINES,)

    @property
    def max_model_len(self) -> int | None:
        return None

    @property
    def fingerprint(self) -> str | None:
        """OpenAI's system_fingerprint: changes with the weights."""
        return None

    @property
    def version(self) -> str:
        """Changes with all that an answer depends on. Empty: not known (yet)."""
        return ""

    @property
    def knows_adapters(self) -> bool:
        """False until a first replica has said which it has."""
        return True

    def adapter_names(self) -> Collection[str]:
        """LoRA adapters of the connected replicas; while none is connected, those last known."""
        return ()

    def adapted(self, name: str) -> Upstream | None:
        """The same with that adapter, whose digest stays what it is now. None: none of them has it."""
        return None

    @abstractmethod
    def replicas(self) -> list[ReplicaHealth]: ...

    @property
    def is_alive(self) -> bool:
        return any(replica.is_connected for replica in self.replicas())

    def retired_replicas(self) -> list[ReplicaHealth]:
        return []

    @abstractmethod
    async def prepare(self, request: GenerationRequest, principal: PrincipalFacts) -> Prepared:
        """Raises InvalidRequest for a request beyond the model, Unavailable while the model is starting, Overloaded."""

    @abstractmethod
    async def tokenize(self, prompt: Conversation | PlainPrompts, *, needs_texts: bool, tenant: str) -> Tokenization:
        """Any length. Raises InvalidRequest, Unavailable while the model starts, Overloaded."""

    @abstractmethod
    async def detokenize(self, token_ids: Sequence[int], *, tenant: str) -> str: ...
