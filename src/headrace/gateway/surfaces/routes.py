"""Lists every path that this server answers. The router, /openapi.json and the table in docs/api.md are made from this list.

A new surface is one file beside this one and its rows here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache

from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces import chat, completions, models, openapi, pages, probes, sessions, tokenize, usage
from headrace.gateway.surfaces.endpoint import Endpoint

Handler = Callable[[Service, Exchange], Awaitable[None]]


async def openapi_json(service: Service, exchange: Exchange) -> None:
    await exchange.reply(200, _document())


ENDPOINTS: tuple[Endpoint[Handler], ...] = (
    chat.chat_completions.endpoint,
    completions.completions.endpoint,
    Endpoint(
        "GET",
        "/v1/models",
        models.list_models,
        "What the key may use, with `max_model_len`, `max_context_tokens` (the smaller of that and the tier's) and its `rate_limits`. "
        "Aliases are listed as models of their own (`root` is the model).",
        reply=models.ModelList,
    ),
    Endpoint(
        "GET",
        "/v1/usage",
        usage.usage,
        "What the key's own tenant has used: requests, tokens and cost, a second after they ended. "
        "404 where no usage is kept, 503 where it cannot be read now.",
        reply=usage.UsageList,
        query=usage.USAGE_QUERY,
        has_limits=True,
    ),
    Endpoint("GET", "/v1/models/{model:path}", models.one_model, "One of them.", reply=models.ModelCard),
    Endpoint(
        "GET",
        "/v1/sessions/{id}",
        sessions.show_session,
        "The messages of one of the tenant's sessions.",
        reply=sessions.SessionReply,
        has_limits=True,
    ),
    Endpoint("DELETE", "/v1/sessions/{id}", sessions.delete_session, "Removes it.", reply=sessions.SessionDeleted, has_limits=True),
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
        pages.front,
        "What this server is and where its paths are: a page for browsers, else JSON. OPTIONS is answered as GET /health is.",
        reply=pages.FrontPage,
        is_probe=True,
        is_quiet=True,
    ),
    Endpoint("GET", "/metrics", probes.metrics, "Prometheus text (or OpenMetrics, if asked for).", media_type="text/plain", is_quiet=True),
    Endpoint("GET", "/version", probes.version, "The version of Headrace.", reply=probes.VersionReply),
    Endpoint("GET", "/load", probes.load, "How many generating requests are in this server.", reply=probes.LoadReply),
    Endpoint("GET", "/openapi.json", openapi_json, "The schemas of all these paths.", media_type="application/json", is_manual=True),
    Endpoint(
        "GET",
        "/docs",
        pages.docs,
        "A page of these schemas that loads nothing from elsewhere; Authorize takes a key to try them with.",
        media_type="text/html",
        is_manual=True,
    ),
    Endpoint("GET", "/docs/{name}", pages.docs_asset, "Its files.", media_type="text/javascript", is_manual=True),
)


@cache
def _document() -> bytes:
    return openapi.document(ENDPOINTS)
