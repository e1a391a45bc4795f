"""Lists every path that this server answers, and finds the row of a path: the gateway's router. /openapi.json and docs/api.md are made of
the list.

{name} stands for one part of a path, {name:path} for the rest of it. Every path is looked up in its plain form (`plain_path`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from headrace.gateway.generation.account import RequestAccount
from headrace.gateway.generation.explanations import Explanation
from headrace.gateway.generation.service import Service
from headrace.gateway.http.asgi import OPENAI, Framing
from headrace.gateway.http.errors import MethodNotAllowed
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces import chat, completions, listings, openapi, probes, tokenize
from headrace.gateway.surfaces.dialect import field_table
from headrace.gateway.surfaces.endpoint import Endpoint


async def openapi_json(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    await exchange.reply(200, _document())


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        field_table.CHAT,
        chat.chat_completions,
        "A conversation's next turn; `stream` for server-sent events.",
        request=chat.ChatRequest,
        parser=chat.CHAT_BODY,
        reply=chat.ChatCompletion,
        chunk=chat.ChatChunk,
        generates=True,
    ),
    Endpoint(
        "POST",
        field_table.COMPLETIONS,
        completions.completions,
        "Text or token ids continued; `stream` for server-sent events.",
        request=completions.CompletionRequest,
        parser=completions.COMPLETION_BODY,
        reply=completions.Completion,
        chunk=completions.Completion,
        generates=True,
    ),
    Endpoint(
        "GET",
        "/v1/models",
        listings.list_models,
        "What the key may use, with `max_model_len`, `max_context_tokens` (the smaller of that and the tier's) and its `rate_limits`. "
        "Aliases are listed as models of their own (`root` is the model), and so are routes, and adapters (`parent` is the base model).",
        reply=listings.ModelList,
        for_readers=True,
    ),
    Endpoint(
        "GET",
        "/v1/usage",
        listings.usage,
        "What the key's own tenant has used (for a reader's key: every tenant): requests, tokens and cost, a second after they ended. "
        "404 where no usage is kept, 503 where it cannot be read now.",
        reply=listings.UsageList,
        query=listings.USAGE_QUERY,
        for_readers=True,
        has_limits=True,
    ),
    Endpoint("GET", "/v1/models/{model:path}", listings.one_model, "One of them.", reply=listings.ModelCard, for_readers=True),
    Endpoint(
        "GET",
        "/v1/requests/{id}/explain",
        listings.explain,
        "Where the time of an ended request went, which replicas it was sent to and why, what it cost. Of the key's own tenant; a reader's "
        "key reads every tenant.",
        reply=Explanation,
        for_readers=True,
        has_limits=True,
    ),
    Endpoint(
        "GET",
        "/v1/sessions/{id}",
        listings.show_session,
        "The messages of one of the tenant's sessions.",
        reply=listings.SessionReply,
        has_limits=True,
    ),
    Endpoint("DELETE", "/v1/sessions/{id}", listings.delete_session, "Removes it.", reply=listings.SessionDeleted, has_limits=True),
    Endpoint(
        "POST",
        "/v1/tokenize",
        tokenize.tokenize,
        "`{model, prompt or messages, tools, add_special_tokens}` -> `{count, max_model_len, tokens, token_strs}` (vLLM's shape).",
        request=tokenize.TokenizeRequest,
        parser=tokenize.TOKENIZE_BODY,
        reply=tokenize.TokenizeReply,
        has_limits=True,
    ),
    Endpoint(
        "POST",
        "/v1/detokenize",
        tokenize.detokenize,
        "`{model, tokens}` -> `{prompt}` (vLLM's shape).",
        request=tokenize.DetokenizeRequest,
        parser=tokenize.DETOKENIZE_BODY,
        reply=tokenize.DetokenizeReply,
        has_limits=True,
    ),
    Endpoint(
        "POST",
        "/tokenize",
        tokenize.tokenize,
        "vLLM's path of /v1/tokenize.",
        request=tokenize.TokenizeRequest,
        parser=tokenize.TOKENIZE_BODY,
        reply=tokenize.TokenizeReply,
        has_limits=True,
    ),
    Endpoint(
        "POST",
        "/detokenize",
        tokenize.detokenize,
        "vLLM's path of /v1/detokenize.",
        request=tokenize.DetokenizeRequest,
        parser=tokenize.DETOKENIZE_BODY,
        reply=tokenize.DetokenizeReply,
        has_limits=True,
    ),
    Endpoint(
        "GET",
        "/health",
        probes.health,
        "vLLM's meaning: 200 while every model has a living engine process, else 503.",
        reply=probes.ProbeReply,
        is_probe=True,
        is_quiet=True,
        may_be_503=True,
    ),
    Endpoint(
        "GET",
        "/ping",
        probes.health,
        "The same under SageMaker's name.",
        reply=probes.ProbeReply,
        is_probe=True,
        is_quiet=True,
        may_be_503=True,
    ),
    Endpoint("GET", "/live", probes.live, "200 while this process answers.", reply=probes.ProbeReply, is_probe=True, is_quiet=True),
    Endpoint(
        "GET",
        "/ready",
        probes.ready,
        "200 while this server can serve: at least one model has a ready replica, prompts can be read, and it is not draining; "
        "else 503 and why. `?model=NAME` asks for one model, `?strict` for every replica.",
        reply=probes.ProbeReply,
        query=probes.READY_QUERY,
        is_probe=True,
        is_quiet=True,
        may_be_503=True,
    ),
    Endpoint(
        "GET",
        "/",
        probes.front,
        "What this server is and where its paths are: a page for browsers, else JSON. OPTIONS is answered as GET /health is.",
        reply=probes.FrontPage,
        is_probe=True,
        is_quiet=True,
    ),
    Endpoint(
        "GET",
        "/metrics",
        probes.metrics,
        "Prometheus text (or OpenMetrics, if asked for).",
        media_type="text/plain",
        for_readers=True,
        is_quiet=True,
    ),
    Endpoint("GET", "/version", probes.version, "The version of Headrace.", reply=probes.VersionReply, for_readers=True),
    Endpoint("GET", "/load", probes.load, "How many generating requests are in this server.", reply=probes.LoadReply, for_readers=True),
    Endpoint("GET", "/openapi.json", openapi_json, "The schemas of all these paths.", media_type="application/json", is_manual=True),
    Endpoint(
        "GET",
        "/docs",
        probes.docs,
        "A page of these schemas that loads nothing from elsewhere; Authorize takes a key to try them with.",
        media_type="text/html",
        is_manual=True,
    ),
    Endpoint("GET", "/docs/{name}", probes.docs_asset, "Its files.", media_type="text/javascript", is_manual=True),
)


@cache
def _document() -> bytes:
    return openapi.document(ENDPOINTS)


MAX_LOGGED_PATH = 200
_SLASHES = re.compile("/{2,}")
_NAMED = re.compile(r"\\{(\w+)(:path)?\\}")


@dataclass(slots=True)
class AnsweredPath:
    """A flag about quiet, public or probes holds if it does for all endpoints; `generates` if it does for one."""

    path: str
    shown_path: str
    methods: dict[str, Endpoint] = field(default_factory=dict)
    generates: bool = False
    is_quiet: bool = True
    is_public: bool = True
    is_probe: bool = True
    framing: Framing = OPENAI

    def add(self, endpoint: Endpoint) -> None:
        assert endpoint.method not in self.methods, f"two rows answer {endpoint.method} {self.path}"
        self.methods[endpoint.method] = endpoint
        self.generates = self.generates or endpoint.generates
        self.framing = endpoint.framing
        self.is_quiet = self.is_quiet and endpoint.is_quiet
        self.is_public = self.is_public and endpoint.is_public
        self.is_probe = self.is_probe and endpoint.is_probe

    def endpoint(self, method: str) -> Endpoint:
        is_get = method == "HEAD" or (method == "OPTIONS" and self.is_probe)  # OPTIONS: how load balancers ask by default
        endpoint = self.methods.get("GET" if is_get else method)
        if endpoint is None:
            raise MethodNotAllowed(method, tuple(sorted({*self.methods, "HEAD"} if "GET" in self.methods else self.methods)))
        return endpoint

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(_NAMED.sub(lambda name: f"(?P<{name[1]}>{'.+' if name[2] else '[^/]+'})", re.escape(self.path)))


def _paths() -> dict[str, AnsweredPath]:
    paths: dict[str, AnsweredPath] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, AnsweredPath(endpoint.path, endpoint.shown_path)).add(endpoint)
    return paths


_PATHS = {path: answered for path, answered in _paths().items() if "{" not in path}
_PATTERNS = [(answered.pattern, answered) for path, answered in _paths().items() if path not in _PATHS]
_BEGINNINGS = {answered.shown_path.partition("{")[0]: answered.shown_path for _, answered in _PATTERNS}
"""Such as "/v1/sessions/" -> "/v1/sessions/{id}"."""


def plain_path(path: str) -> str:
    """Single slashes and none at the end. Clients that join a base URL badly send others, and a redirect, which most of them follow with a
    GET, would lose the body.
    """
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def find_path(path: str) -> tuple[AnsweredPath | None, Mapping[str, str]]:
    answered = _PATHS.get(path)
    if answered is not None:
        return answered, {}
    for pattern, answered in _PATTERNS:
        if (match := pattern.fullmatch(path)) is not None:
            return answered, match.groupdict()
    return None, {}


def logged_path(path: str) -> str:
    """Without the client's own name: sessions are named by clients."""
    if path in _PATHS:
        return path
    return next((shown for beginning, shown in _BEGINNINGS.items() if path.startswith(beginning)), path)[:MAX_LOGGED_PATH]
