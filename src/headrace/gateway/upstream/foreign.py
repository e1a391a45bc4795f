"""Any OpenAI-compatible server behind the seam: chat and completions over HTTP, always streamed from it.

Where it is comes from the operator's configuration alone: nothing from a client becomes part of a URL, no redirect is followed, no proxy is
taken from the environment. What it sends is bounded and never shown as it is: its errors become ours, its events are decoded into typed
values or the stream is broken. Before its first token a failure has a status; afterwards it is a retryable error at the stream's end.

Not known here: the number of prompt tokens before the server has reported it, the server's context length, its chat template.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from headrace.core.errors import ConfigError, HeadraceError, InvalidRequest, Overloaded, Unavailable
from headrace.core.plan import LogprobColumns
from headrace.core.sampling import SamplingParams
from headrace.core.update import StageSeconds
from headrace.gateway.config import MAX_FOREIGN_CONNECTIONS, ForeignConfig
from headrace.gateway.http.errors import foreign_overflow
from headrace.gateway.upstream.foreign_body import foreign_body
from headrace.gateway.upstream.foreign_events import MAX_ERROR_BYTES, BrokenStream, EventReader, is_context_overflow
from headrace.gateway.upstream.seam import (
    Conversation,
    EventListener,
    GenerationRequest,
    OutputEvent,
    PlainPrompts,
    PrincipalFacts,
    ReplicaHealth,
    Tokenization,
    TokenUsage,
)
from headrace.text.logprobs import DecodedLogprobs

log = logging.getLogger("headrace.gateway")

REPLICA = "foreign"
"""Replica name of a foreign server in metrics and logs."""

NOT_NOW = "The server behind this model does not answer now; the request can be sent again."
BROKE = "The server behind this model broke off its answer; the request can be sent again."
MAX_UNREAD_BYTES = 64 << 10
"""Bytes read ahead of a slow client; beyond them the server's stream is not read."""

EVENT_BYTES = 256
"""Memory of an event without its content."""

ERROR_BODY_S = 5.0
"""Seconds a server may take for an error's body after its status."""

_TOKENIZER = "a model that this server runs itself"


class HttpUpstream:
    """One model of one server. An `Upstream`."""

    def __init__(self, name: str, config: ForeignConfig, session: aiohttp.ClientSession, api_key: str) -> None:
        """name: of the model here, for the log; config.model is what the server calls it"""
        self.name = name
        self._config = config
        self._session = session
        self._num_open = 0
        self._headers = {"accept": "text/event-stream", "content-type": "application/json", "accept-encoding": "identity"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    @property
    def max_model_len(self) -> int | None:
        return None

    @property
    def fingerprint(self) -> str | None:
        return None

    def replicas(self) -> list[ReplicaHealth]:
        """The server is not probed: it counts as ready, and a request that fails finds out."""
        return [ReplicaHealth(REPLICA, is_connected=True, reason="")]

    async def prepare(self, request: GenerationRequest, principal: PrincipalFacts) -> HttpPrepared:
        params = SamplingParams(**request.sampling).checked()
        body = foreign_body(request, params) | {"model": self._config.model or self.name}
        if self._config.cache_salt:
            body["cache_salt"] = principal.salt.hex()
        return HttpPrepared(self, request, params, msgspec.json.encode(body))

    async def tokenize(self, prompt: Conversation | PlainPrompts, *, needs_texts: bool, tenant: str) -> Tokenization:
        raise InvalidRequest("model", _TOKENIZER, self.name, "The server behind this model keeps its tokenizer.")

    async def detokenize(self, token_ids: Sequence[int], *, tenant: str) -> str:
        raise InvalidRequest("model", _TOKENIZER, self.name, "The server behind this model keeps its tokenizer.")

    @asynccontextmanager
    async def post(self, path: str, body: bytes, request_id: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The server's response, with status 200. Raises its refusal as an error of ours, Overloaded at our own limit."""
        if self._num_open >= MAX_FOREIGN_CONNECTIONS:
            raise Overloaded(f"The server behind this model already works on {MAX_FOREIGN_CONNECTIONS} requests from here.")
        url = f"{self._config.url.rstrip('/')}/{path}"
        headers = {**self._headers, "x-request-id": request_id}
        self._num_open += 1
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    raise await self._refusal(response)
                yield response
        finally:
            self._num_open -= 1

    def log_fault(self, what: str) -> None:
        """Log a fault for the operator, without any text from the server."""
        log.warning("model %s: its server %s", self.name, what)

    async def _refusal(self, response: aiohttp.ClientResponse) -> HeadraceError:
        status = response.status
        if status == 429:
            return Overloaded("The server behind this model has too much to do.", retry_after_s=_retry_after_s(response))
        if status in (400, 413, 422):
            if is_context_overflow(await _error_body(response)):
                return foreign_overflow()
            return InvalidRequest("body", f"what the server behind this model accepts (it said {status})", None, "Leave out rare fields.")
        self.log_fault(f"answered with status {status}")
        return Unavailable(NOT_NOW, retry_after_s=_retry_after_s(response))


@dataclass(frozen=True, slots=True)
class ForeignPrompt:
    """A prompt that only the server reads. Its log-probabilities are refused before anything runs."""

    text: str
    num_tokens: None = None

    def decoded_logprobs(self, logprobs: LogprobColumns) -> Iterator[DecodedLogprobs]:
        return iter(())


@dataclass(frozen=True, slots=True)
class HttpPrepared:
    """A body that was not sent yet. A `Prepared`."""

    _upstream: HttpUpstream
    _request: GenerationRequest
    _params: SamplingParams
    _body: bytes

    @property
    def ignored(self) -> Sequence[str]:
        return ["priority"] if self._request.has_priority else []  # it is not sent; what else has no effect that server does not say

    @property
    def prompt_tokens(self) -> int | None:
        return None

    @property
    def max_output_tokens(self) -> int | None:
        return None if self._params.max_tokens is None else self._params.max_tokens * self.num_sequences

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self._params.n

    @property
    def seed(self) -> int | None:
        return self._params.seed

    @property
    def prompts(self) -> Sequence[ForeignPrompt]:
        prompt = self._request.prompt
        if isinstance(prompt, Conversation):
            return [ForeignPrompt("")]
        return [ForeignPrompt(given if isinstance(given, str) else "") for given in prompt.prompts]

    def stream(self) -> HttpStream:
        path = "chat/completions" if isinstance(self._request.prompt, Conversation) else "completions"
        return HttpStream(self._upstream, path, self._body, self._request.request_id, EventReader(self.num_sequences))


class HttpStream:
    """One request at the server. An `EventStream`: a task of its own reads, so that cancelling ends it wherever it waits."""

    def __init__(self, upstream: HttpUpstream, path: str, body: bytes, request_id: str, reader: EventReader) -> None:
        self._upstream = upstream
        self._path = path
        self._body = body
        self._request_id = request_id
        self._reader = reader
        self._task: asyncio.Task[None] | None = None
        self._unread: dict[int, OutputEvent] = {}
        self.unread_bytes = 0
        self._error: HeadraceError | None = None
        self._is_ended = False
        self._has_more = asyncio.Event()
        self._has_room = asyncio.Event()

    async def events(self) -> list[OutputEvent]:
        if self._task is None and not self._is_ended:
            self._task = asyncio.create_task(self._read())
        while not self._unread and not self._is_ended:
            self._has_more.clear()
            await self._has_more.wait()
        events = list(self._unread.values())
        self._unread.clear()
        self.unread_bytes = 0
        self._has_room.set()
        if not events and self._error is not None:
            raise self._error
        return events

    def listen(self, listener: EventListener | None) -> None:
        """Ignored: the task that reads is not the one that may write."""

    def usage(self) -> TokenUsage:
        return self._reader.usage

    def replica(self, index: int) -> str | None:
        return REPLICA

    def queue_time_s(self, index: int) -> float | None:
        return None

    def stages(self, index: int) -> StageSeconds | None:
        return None

    def cancel(self) -> None:
        """The connection is closed, which is how the server hears of it."""
        self._is_ended = True
        self._unread.clear()
        self._has_more.set()
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        self.cancel()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        has_begun = False
        try:
            async with self._upstream.post(self._path, self._body, self._request_id) as response:
                async for events in self._reader.batches(response):
                    has_begun = True
                    await self._put(events)
        except HeadraceError as error:
            self._error = error
        except BrokenStream as error:
            self._upstream.log_fault(f"broke off an answer: {error}")
            self._error = Unavailable(BROKE)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._upstream.log_fault(f"was lost: {type(error).__name__}")
            self._error = Unavailable(BROKE if has_begun else NOT_NOW)
        except Exception as error:  # the outermost: whatever went wrong, an answer that broke off must not look complete
            place = "".join(traceback.format_tb(error.__traceback__))
            log.error("model %s: reading from its server failed\n%s%s", self._upstream.name, place, type(error).__name__)
            self._error = Unavailable(BROKE if has_begun else NOT_NOW)
        finally:
            self._is_ended = True
            self._has_more.set()

    async def _put(self, events: list[OutputEvent]) -> None:
        for event in events:
            before = self._unread.get(event.index)
            self._unread[event.index] = event if before is None else OutputEvent.joined((before, event))
            self.unread_bytes += EVENT_BYTES + event.num_bytes
        self._has_more.set()
        while self.unread_bytes > MAX_UNREAD_BYTES:
            self._has_room.clear()
            await self._has_room.wait()


@asynccontextmanager
async def open_upstream(name: str, config: ForeignConfig) -> AsyncIterator[HttpUpstream]:
    """Connections to one server: nothing of the environment, no cookies, nothing unpacked. Raises ConfigError where its key is not."""
    api_key = read_key(config)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_s, sock_read=config.read_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )
    async with session:
        yield HttpUpstream(name, config, session, api_key)


def read_key(config: ForeignConfig) -> str:
    """The key the server wants; empty: none. Raises ConfigError, never showing what was read."""
    where = "api_key_env" if config.api_key_env else "api_key_file"
    try:
        key = os.environ[config.api_key_env] if config.api_key_env else config.api_key_file and Path(config.api_key_file).read_text("ascii")
    except KeyError:
        raise ConfigError(where, f"the variable {config.api_key_env} is not set") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(where, f"{config.api_key_file} cannot be read ({getattr(error, 'strerror', None) or 'not ASCII'})") from None
    key = key.strip()
    if (config.api_key_env or config.api_key_file) and (not key or not key.isascii() or not key.isprintable()):
        raise ConfigError(where, "does not hold a key", "One line of printable ASCII.")
    return key


async def _error_body(response: aiohttp.ClientResponse) -> bytes:
    """As much of it as comes within its bounds of size and time, in however many pieces."""
    body = bytearray()
    try:
        async with asyncio.timeout(ERROR_BODY_S):
            while piece := await response.content.read(MAX_ERROR_BYTES - len(body)):
                body += piece
    except (aiohttp.ClientError, OSError, TimeoutError):
        pass  # the status is known, and what came may say why
    return bytes(body)


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    given = response.headers.get("retry-after", "")
    return float(min(int(given), 3600)) if given.isascii() and given.isdigit() and len(given) < 9 else 1.0
