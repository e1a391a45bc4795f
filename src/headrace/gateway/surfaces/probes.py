"""/health, /live, /ready and the small questions: what is alive, what is ready and why not, how much is running."""

from __future__ import annotations

import msgspec

import headrace
from headrace.core.errors import InvalidRequest
from headrace.core.sampling import check_token_ids
from headrace.gateway.generation.run import Service, parsed
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces.dialect import schemas
from headrace.gateway.surfaces.dialect.parse import parse_detokenize, parse_tokenize, template_messages
from headrace.gateway.upstream.served_models import ServedModel

_encode = msgspec.json.encode


async def live(service: Service, exchange: Exchange) -> None:
    """This process answers: its event loop turns. Nothing else is asked."""
    await exchange.reply(200, _encode(schemas.ProbeReply(ok=True, replicas=[])))


async def health(service: Service, exchange: Exchange) -> None:
    """vLLM's meaning: 200 while every model has a living engine process, else 503."""
    dead = [model.name for model in service.models.models if not model.pool.is_alive]
    reason = f"no engine for: {', '.join(dead)}" if dead else ""
    await exchange.reply(503 if dead else 200, _encode(schemas.ProbeReply(ok=not dead, replicas=[], reason=reason)))


async def ready(service: Service, exchange: Exchange) -> None:
    """200 while this gateway takes requests and every replica of every model answers and its loop turns; else 503 and why."""
    states = [
        schemas.ReplicaState(model=model.name, replica=replica.name, ok=not reason, reason=reason)
        for model in service.models.models
        for replica, reason in model.pool.verdicts()
    ]
    reason = "draining" if service.open_requests.is_draining else "; ".join(f"{s.model}/{s.replica} {s.reason}" for s in states if not s.ok)
    await exchange.reply(503 if reason else 200, _encode(schemas.ProbeReply(ok=not reason, replicas=states, reason=reason)))


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.reply(200, _encode(schemas.VersionReply(version=headrace.__version__)))


async def load(service: Service, exchange: Exchange) -> None:
    """vLLM's /load: generating requests in this server now."""
    await exchange.reply(200, _encode(schemas.LoadReply(server_load=service.open_requests.num_open)))


async def metrics(service: Service, exchange: Exchange) -> None:
    accept = (exchange.header(b"accept") or b"").decode("latin-1")
    body, content_type = service.metrics.page(accept)
    await exchange.reply(200, body, [(b"content-type", content_type.encode())])


async def list_models(service: Service, exchange: Exchange) -> None:
    cards = [_card(model, name) for model in service.models.models for name in (model.name, *model.aliases)]
    await exchange.reply(200, _encode(schemas.ModelList(object="list", data=cards)))


async def one_model(service: Service, exchange: Exchange) -> None:
    name: str = exchange.scope["path_params"]["model"]
    await exchange.reply(200, _encode(_card(service.models.get(name), name)))


async def tokenize(service: Service, exchange: Exchange) -> None:
    """vLLM's /tokenize: a prompt or a conversation as token ids."""
    request = await parsed(service, exchange, parse_tokenize)
    model = service.models.only(request.model)
    exchange.record.model = model.name
    reply = await service.text_pool.run(_tokenized, model, request)
    await exchange.reply(200, _encode(reply))


async def detokenize(service: Service, exchange: Exchange) -> None:
    request = await parsed(service, exchange, parse_detokenize)
    model = service.models.only(request.model)
    exchange.record.model = model.name
    await exchange.reply(200, _encode(await service.text_pool.run(_detokenized, model, request)))


def _ids(model: ServedModel, request: schemas.TokenizeRequest) -> list[int]:
    tokenizer = model.text.tokenizer
    if request.messages is not None:
        if request.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens", "absent, null or false beside messages", True, "The template writes the begin token."
            )
        messages = template_messages(request.messages)
        return model.text.template.encode(tokenizer, messages, add_generation_prompt=request.add_generation_prompt is not False)
    assert request.prompt is not None
    return tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)


def _tokenized(model: ServedModel, request: schemas.TokenizeRequest) -> schemas.TokenizeReply:
    """Runs in the text pool. vLLM's bench reads token_strs, so they are there unless declined."""
    ids = _ids(model, request)
    tokenizer = model.text.tokenizer
    strs = [tokenizer.id_to_token(token_id) or "" for token_id in ids] if request.return_token_strs is not False else None
    return schemas.TokenizeReply(count=len(ids), max_model_len=model.info.max_model_len, tokens=ids, token_strs=strs)


def _detokenized(model: ServedModel, request: schemas.DetokenizeRequest) -> schemas.DetokenizeReply:
    check_token_ids("tokens", request.tokens, model.text.tokenizer.vocab_size)
    return schemas.DetokenizeReply(prompt=model.text.tokenizer.decode(request.tokens, skip_special_tokens=False))


def _card(model: ServedModel, name: str) -> schemas.ModelCard:
    """A model that is still starting is listed with what is known: no context length yet."""
    info = model.pool.info
    return schemas.ModelCard(
        id=name,
        object="model",
        created=model.created,
        owned_by="headrace",
        root=model.name,
        parent=None,
        max_model_len=info.max_model_len if info else None,
        status="ready" if any(not reason for _, reason in model.pool.verdicts()) else "starting",
    )
