"""The connections to one foreign server, and what the server says of itself: limits of its models, load, rate limits.

Connections take nothing of the environment, no cookies, no redirects, nothing unpacked, no link-local address. The operator's file alone
says where a server is; nothing from a client becomes part of a URL or a header but the request id made here.

Of what a server says of itself nothing is kept but numbers, each within bounds; what is not understood is not known. `watch` asks for its
list of models and its load, for as long as the gateway runs. Nothing that the server answers, or fails to, is fatal.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from headrace.core.clock import Clock
from headrace.core.errors import ConfigError
from headrace.core.hosts import is_link_local
from headrace.gateway.upstream.foreign_words import count_of, read_json
from headrace.gateway.upstream.model_config import ForeignConfig
from headrace.wire.private_files import why_not_private

if TYPE_CHECKING:
    from headrace.gateway.upstream.foreign_server import ForeignServer

log = logging.getLogger("headrace.gateway")

MAX_FACTS_BYTES = 2 << 20
"""Most bytes read of a list of models or a metrics page; a longer one is not used."""

NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, UnicodeError)
"""What is raised where no connection could be made: a server that is down, and a name without an address or that is none."""

FACTS_S = 5.0
"""Seconds in which a server has to send a list of models or a metrics page."""


class ForeignSession:
    """Requests to one server, with its key."""

    def __init__(self, config: ForeignConfig, session: aiohttp.ClientSession, api_key: str) -> None:
        self._url = config.url.rstrip("/")
        self.models_url = f"{self._url}/models"
        self._session = session
        self._headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {api_key}"} if api_key else {})}

    @property
    def metrics_url(self) -> str | None:
        """Beside /v1, where vLLM and others have it; None for an address that ends otherwise."""
        return self._url.removesuffix("/v1") + "/metrics" if self._url.endswith("/v1") else None

    async def post(self, path: str, body: bytes, request_id: str) -> aiohttp.ClientResponse:
        """The response to a request, once its headers are there; the caller closes it."""
        headers = {**self._headers, "accept": "text/event-stream", "content-type": "application/json", "x-request-id": request_id}
        return await self._session.post(f"{self._url}/{path}", data=body, headers=headers, allow_redirects=False)

    async def get(self, url: str) -> tuple[int, bytes]:
        """Status and body, which is empty where it is longer than MAX_FACTS_BYTES. Raises what aiohttp raises, and TimeoutError."""
        async with (
            asyncio.timeout(FACTS_S),
            self._session.get(url, headers=self._headers, allow_redirects=False) as response,
        ):
            body = bytearray()
            while piece := await response.content.read(64 << 10):
                body += piece
                if len(body) > MAX_FACTS_BYTES:
                    return response.status, b""
            return response.status, bytes(body)


@asynccontextmanager
async def open_session(model: str, name: str, config: ForeignConfig) -> AsyncIterator[ForeignSession]:
    """Connections to one server of a model until the block ends. Raises ConfigError where its key is not.

    model, name  of the model and of the server, for the log
    """
    api_key = read_key(config)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=None if config.allow_link_local else partial(_guarded_socket, model, name)),
        timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )
    async with session:
        yield ForeignSession(config, session, api_key)


def read_key(config: ForeignConfig) -> str:
    """The key the server wants; empty: none. A file that others may read is named in the log, since it often belongs to another system.

    Raises ConfigError, never showing what was read.
    """
    where = "api_key_env" if config.api_key_env else "api_key_file"
    try:
        key = os.environ[config.api_key_env] if config.api_key_env else config.api_key_file and Path(config.api_key_file).read_text("ascii")
    except KeyError:
        raise ConfigError(where, f"the variable {config.api_key_env} is not set") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(where, f"{config.api_key_file} cannot be read ({getattr(error, 'strerror', None) or 'not ASCII'})") from None
    if config.api_key_file and (reason := why_not_private(where, config.api_key_file)):
        log.warning("%s", reason)
    key = key.strip()
    if (config.api_key_env or config.api_key_file) and (not key or not key.isascii() or not key.isprintable()):
        raise ConfigError(where, "does not hold a key", "One line of printable ASCII.")
    return key


def _guarded_socket(model: str, name: str, address: tuple[Any, ...]) -> socket.socket:
    """For an address that a name was resolved to, immediately before it is connected to: the name's answer may have changed."""
    family, kind, protocol, _, place = address
    if is_link_local(place[0]):
        reason = "has a link-local address and is not connected to; allow_link_local would allow it"
        log.warning("model %s: its server %s %s", model, name, reason)
        raise PermissionError("a link-local address")
    return socket.socket(family, kind, protocol)


MAX_WAIT_S = 3600.0
"""A server that asks for a longer wait is asked again after this many seconds."""

LOAD_METRICS = (
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ("headrace_requests_running", "headrace_requests_waiting"),
    ("tgi_batch_current_size", "tgi_queue_size"),
)
"""Names of the running and of the waiting requests on the metrics pages of servers that have them."""

_LINE_BEGINS = tuple(name for pair in LOAD_METRICS for name in pair)
_MAX_LINE_CHARS = 4096
_SAMPLE = re.compile(r'([a-z_:]+)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})? +([0-9.eE+]{1,32})(?: +\d+)?\s*')
_MODEL_LABEL = re.compile(r'(?:^|,)\s*(?:model|model_name)="((?:\\.|[^"\\])*)"')
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

MAX_CONTEXT_TOKENS = 2**40
"""A context that is said to be longer is not believed."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model in a server's list. max_model_len: prompt and output together; None where the list does not say (vLLM, SGLang and Headrace
    say it as `max_model_len`, OpenRouter as `context_length`, llama.cpp as `n_ctx` of `meta`)."""

    is_listed: bool
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class ReportedLoad:
    """Requests (sequences, where the server counts these) on a server's metrics page."""

    num_running: int
    num_waiting: int


def listed_model(body: bytes, name: str) -> ListedModel | None:
    """What a `GET /v1/models` says of one model; None for a body that is no list of models.

    The list stands in `data` or `models`, or is the body; it is null at a server without models. An entry may be a name alone.
    """
    try:
        models = read_json(body)
    except ValueError:
        return None
    if isinstance(models, dict):
        place = next((place for place in ("data", "models") if place in models), None)
        models = (models[place] or []) if place else None
    if not isinstance(models, list):
        return None
    for model in models:
        if model == name:
            return ListedModel(True)
        if isinstance(model, dict) and name in (model.get("id"), model.get("name") if "id" not in model else None):
            return ListedModel(True, _context_tokens(model))
    return ListedModel(False)


def _context_tokens(model: Mapping[str, object]) -> int | None:
    meta = model.get("meta")
    limits = [model.get("max_model_len"), model.get("context_length"), meta.get("n_ctx") if isinstance(meta, dict) else None]
    counts = [count for count in map(count_of, limits) if count is not None and 1 <= count <= MAX_CONTEXT_TOKENS]
    return counts[0] if counts else None


def reported_load(page: bytes, name: str) -> ReportedLoad | None:
    """The load on a metrics page in Prometheus' text format, summed over its samples; None where the page has none that is known.

    name  of the model there: samples that have a label `model` or `model_name` count where it is this name
    """
    sums: dict[str, float] = {}
    for line in page.decode("utf-8", "replace").splitlines():
        if len(line) > _MAX_LINE_CHARS or not line.startswith(_LINE_BEGINS) or (match := _SAMPLE.fullmatch(line)) is None:
            continue
        metric, labels, value = match.groups()
        model = _MODEL_LABEL.search(labels or "")
        if model is None or model[1] == name:
            sums[metric] = sums.get(metric, 0.0) + _number(value)
    for running, waiting in LOAD_METRICS:
        if running in sums:
            return ReportedLoad(_count(sums[running]), _count(sums.get(waiting, 0.0)))
    return None


def retry_after_s(headers: Mapping[str, str], unix_now: float) -> float | None:
    """Seconds that an answer asks to wait: `retry-after-ms`, or `Retry-After` as seconds or a date. None where it does not say."""
    if (given := headers.get("retry-after-ms", "")) and (milliseconds := _number(given)) >= 0:
        return _bounded(milliseconds / 1000)
    given = headers.get("retry-after", "")
    if (seconds := _number(given)) >= 0:
        return _bounded(seconds)
    try:
        when = parsedate_to_datetime(given)
    except (ValueError, OverflowError):
        return None
    return _bounded((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - unix_now)


def exhausted_s(headers: Mapping[str, str]) -> float:
    """Seconds until a provider takes requests again, where its counters say that none are left; 0 where some are, or nothing is said.

    Read are OpenAI's x-ratelimit-remaining-requests, -tokens and their x-ratelimit-reset-*, and the IETF draft's ratelimit-remaining.
    """
    wait_s = 0.0
    for remaining, reset in (
        ("x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
        ("x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
        ("ratelimit-remaining", "ratelimit-reset"),
    ):
        if remaining in headers and headers[remaining].strip() == "0":
            wait_s = max(wait_s, _duration_s(headers.get(reset, "")))
    return wait_s


def _duration_s(text: str) -> float:
    """Seconds in "6m0s", "20ms" or "12.5"; 0 for anything else."""
    text = text.strip()
    parts = _PARTS.findall(text)
    if parts and "".join(number + unit for number, unit in parts) == text:
        return _bounded(sum(_number(number) * _SECONDS[unit] for number, unit in parts))
    return _bounded(max(0.0, _number(text)))


def _number(text: str) -> float:
    """A finite number; -1 for what is none."""
    text = text.strip()
    if not text.isascii() or len(text) > 32 or not text[:1].isdigit():
        return -1.0
    try:
        number = float(text)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_WAIT_S)


def _count(value: float) -> int:
    return int(min(max(value, 0.0), 2**31))


MODELS_S = 60.0
"""Seconds between two lists of models."""

UNREACHABLE_S = 5.0
"""The same for a server that cannot be reached, so that it is used again soon after it came back."""

LOAD_S = 1.0
"""Seconds between two metrics pages."""

NO_ANSWER = (*NOT_CONNECTED, aiohttp.ClientError, OSError, TimeoutError)


async def watch(server: ForeignServer, *, reads_load: bool, clock: Clock) -> None:
    """Ask a server for its list of models and its load, until cancelled.

    reads_load  its metrics are asked for: they decide only among several servers. A server without known ones is asked again with each list
    """
    asked_at, has_load = -math.inf, False
    while True:
        if clock() - asked_at >= (MODELS_S if server.is_reachable else UNREACHABLE_S):
            asked_at = clock()
            await _read_models(server)
            has_load = reads_load
        if has_load:
            has_load = await _read_load(server)
        await asyncio.sleep(LOAD_S)


async def _read_models(server: ForeignServer) -> None:
    """Learn whether it can be reached, whether it lists the model, and the model's limit."""
    try:
        status, body = await server.session.get(server.session.models_url)
    except NOT_CONNECTED as error:
        if server.is_reachable:
            server.log_fault(f"cannot be reached: {type(error).__name__}")
        server.is_reachable = False
        return
    except NO_ANSWER:
        return  # a server that is slow or does not have the list may answer requests all the same
    server.is_reachable = True
    if status in (401, 403) and not server.is_key_refused:
        server.log_fault(f"does not list its models: status {status}; is its key right?")
    server.is_key_refused = status in (401, 403)
    listed = listed_model(body, server.far_name) if status == 200 else None
    if listed is not None and listed != server.listed:
        if listed.is_listed:
            server.log_fact(f"lists the model, with a context of {listed.max_model_len or 'unknown'} tokens")
        else:
            server.log_fault(f"does not list the model {server.far_name!r}")
        server.listed = listed


async def _read_load(server: ForeignServer) -> bool:
    """Note the load on its metrics page. False where it has none that is known."""
    num_sent, url = server.num_sent, server.session.metrics_url
    if url is None:
        return False
    try:
        status, page = await server.session.get(url)
    except NO_ANSWER:
        return True  # the list of models says whether the server can be reached
    load = reported_load(page, server.far_name) if status == 200 else None
    if load is not None:
        server.note_load(load, num_sent=num_sent)
    return load is not None
