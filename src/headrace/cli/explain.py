"""`headrace explain` says where the time of one request went, which replicas it was sent to and why, and what it cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.admin.directory import AsJson
from headrace.cli.chat.chat import DEFAULT_URL, ClientKey

if TYPE_CHECKING:
    from headrace.gateway.generation.explanations import ComparedReplica, ExplainedAttempt, Explanation

BAR_CHARS = 40


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The `id` of an answer or of one of its events, or its x-request-id.")],
    url: Annotated[str, typer.Option("--url", help="Root of the server.")] = DEFAULT_URL,
    api_key: ClientKey = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a request went. A key of the role reader may ask about every tenant's."""
    from urllib.parse import quote

    from headrace.cli.chat.client import ApiClient
    from headrace.gateway.generation.explanations import explanation_of
    from headrace.observe.logs import printable

    shown_id = request_id.partition("/")[0]  # of an event of a stream: its number follows
    answer = ApiClient(url, api_key=api_key).get(f"/v1/requests/{quote(shown_id, safe='')}/explain")
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    for line in lines_of(explanation_of(answer)):
        print(printable(line))


def lines_of(explanation: Explanation) -> Iterator[str]:
    from headrace.observe.logs import timestamp

    yield f"request {explanation.request_id} of {explanation.tenant or 'an unknown caller'}, {timestamp(explanation.time)}"
    yield (
        f"{explanation.path}, {explanation.adapter or explanation.model or 'no model'}: {explanation.outcome} ({explanation.status})"
        + _why(explanation)
    )
    yield _figures(explanation)
    yield from _miss(explanation)
    yield ""
    yield from _stages(explanation)
    yield ""
    yield from _route(explanation)
    if explanation.limits:
        yield "limits    " + ", ".join(f"{limit.name} {limit.used:,.12g} of {limit.limit:,.12g}" for limit in explanation.limits)
    yield f"kept in   {'the ledger' if explanation.kept_in == 'ledger' else 'the memory of the gateway process that answered, alone'}"


def _why(explanation: Explanation) -> str:
    about = (
        f"{explanation.param}: expected {explanation.reason}"
        if explanation.param and explanation.reason
        else explanation.reason or explanation.param
    )
    finished = explanation.finish_reasons and f"finished by {', '.join(explanation.finish_reasons)}"
    continued = explanation.continued_id and f"goes on with {explanation.continued_id}"
    parts = [finished, continued, explanation.error, about, f"limit {explanation.limit}" if explanation.limit else None, explanation.detail]
    return "".join(f", {part}" for part in parts if part)


def _figures(explanation: Explanation) -> str:
    tokens = explanation.tokens
    parts = [_seconds(explanation.wall_s)]
    if explanation.ttft_s is not None:
        parts.append(f"first token after {_seconds(explanation.ttft_s)}")
    if explanation.tpot_s is not None:
        parts.append(f"then {_seconds(explanation.tpot_s)} a token")
    if tokens.prompt is not None:
        parts.append(f"{tokens.prompt:,} tokens in ({tokens.cached or 0:,} cached), {tokens.completion or 0:,} out")
    if explanation.cost is not None:
        parts.append(f"cost {explanation.cost:.9f}".rstrip("0"))
    return ", ".join(parts)


def _miss(explanation: Explanation) -> Iterator[str]:
    if (miss := explanation.tokens.miss) is not None:
        yield f"not cached from token {miss.at_token:,} on{f', in {miss.part}' if miss.part else ''}: {miss.reason.replace('_', ' ')}"


def _stages(explanation: Explanation) -> Iterator[str]:
    width = max([len("unattributed"), *[len(stage.name) for stage in explanation.stages]])
    yield f"{'stage':{width}}     start      time"
    for stage in explanation.stages:
        begin = round(BAR_CHARS * stage.start_s / explanation.wall_s) if explanation.wall_s else 0
        length = max(1, round(BAR_CHARS * stage.seconds / explanation.wall_s)) if explanation.wall_s else 1
        bar = " " * min(begin, BAR_CHARS - 1) + "#" * length
        yield f"{stage.name:{width}} {_seconds(stage.start_s):>9} {_seconds(stage.seconds):>9}  |{bar[:BAR_CHARS]:{BAR_CHARS}}|"
    yield f"{'unattributed':{width}} {'':9} {_seconds(explanation.unattributed_s):>9}"


def _route(explanation: Explanation) -> Iterator[str]:
    route = explanation.route
    for each in route.models:
        yield f"model     {each.model}{'' if each.is_chosen else ', passed over'}: {each.reason}"
    if route.cache_tier is not None:
        yield f"answered  from the {route.cache_tier} cache"
    for attempt in route.attempts:
        yield from _attempt(attempt)
    if not route.attempts and route.cache_tier is None:
        yield "route     it was sent to no replica"


def _attempt(attempt: ExplainedAttempt) -> Iterator[str]:
    sequences = f", {attempt.num_sequences} sequences" if attempt.num_sequences > 1 else ""
    by = f" by {attempt.policy}" if attempt.policy else ""
    yield (
        f"replica   {attempt.replica}{by}, {attempt.reason}: {attempt.result} after {_seconds(attempt.seconds)}"
        f"{sequences}{f' ({attempt.detail})' if attempt.detail else ''}"
    )
    yield from _compared(attempt.compared)


def _compared(replicas: Sequence[ComparedReplica]) -> Iterator[str]:
    for each in replicas:
        done = "" if each.predicted_s is None else f", done in {_seconds(each.predicted_s)}"
        lacks = ", too few KV blocks free" if each.lacks_blocks else ""
        fullness = "" if each.fullness is None else f", KV {each.fullness:.0%} in use"
        cached = f", {each.cached_tokens} tokens cached" if each.cached_tokens else ""
        yield f"          - {each.replica}: {each.outstanding} requests{fullness}{lacks}{cached}{done}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"
