"""/health, /live, /ready and the small questions: what is alive, what is ready and why not, how much is running."""

from __future__ import annotations

import msgspec

import headrace
from headrace.core.errors import InvalidRequest
from headrace.gateway import schemas
from headrace.gateway.exchange import Exchange
from headrace.gateway.generate import Service, read_object
from headrace.gateway.models import ServedModel
from headrace.gateway.parse import check_messages, convert, template_messages

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
    reason = "draining" if service.ledger.is_draining else "; ".join(f"{s.model}/{s.replica} {s.reason}" for s in states if not s.ok)
    await exchange.reply(503 if reason else 200, _encode(schemas.ProbeReply(ok=not reason, replicas=states, reason=reason)))


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.reply(200, _encode(schemas.VersionReply(version=headrace.__version__)))


async def load(service: Service, exchange: Exchange) -> None:
    """vLLM's /load: generating requests in this server now."""
    await exchange.reply(200, _encode(schemas.LoadReply(server_load=service.ledger.num_open)))


async def metrics(service: Service, exchange: Exchange) -> None:
    accept = (exchange.header(b"accept") or b"").decode("latin-1")
    service.metrics.requests_open.set(service.ledger.num_open)
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
    body = await read_object(service, exchange)
    check_nullable(body, "messages")
    if body.get("messages") is not None:
        check_messages(body["messages"], service.config.limits)
    request = convert(body, schemas.TokenizeRequest)
    model = service.models.only(request.model)
    exchange.record.model = model.name
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("prompt", "either prompt or messages to be given")
    ids = await service.text_pool.run(_ids, model, request)
    strs = [model.text.tokenizer.id_to_token(token_id) or "" for token_id in ids] if request.return_token_strs is not False else None
    reply = schemas.TokenizeReply(count=len(ids), max_model_len=model.info.max_model_len, tokens=ids, token_strs=strs)
    await exchange.reply(200, _encode(reply))


async def detokenize(service: Service, exchange: Exchange) -> None:
    request = convert(await read_object(service, exchange), schemas.DetokenizeRequest)
    model = service.models.only(request.model)
    exchange.record.model = model.name
    high = model.text.tokenizer.vocab_size - 1
    for token_id in request.tokens:
        if not 0 <= token_id <= high:
            raise InvalidRequest("tokens", f"token ids with 0 <= id <= {high}", token_id)
    text = await service.text_pool.run(model.text.tokenizer.decode, request.tokens, skip_special_tokens=False)
    await exchange.reply(200, _encode(schemas.DetokenizeReply(prompt=text)))


def check_nullable(body: dict[str, object], name: str) -> None:
    if name in body and body[name] is None:
        del body[name]


def _ids(model: ServedModel, request: schemas.TokenizeRequest) -> list[int]:
    tokenizer = model.text.tokenizer
    if request.messages is not None:
        if request.add_special_tokens:
            raise InvalidRequest("add_special_tokens", "to be false beside messages", True, "The template writes the begin token.")
        messages = template_messages(request.messages)
        return model.text.template.encode(tokenizer, messages, add_generation_prompt=request.add_generation_prompt)
    assert request.prompt is not None
    return tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)


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
