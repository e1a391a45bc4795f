"""Tests what foreign servers are asked: in the form that each takes, learned from its refusals, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from foreign_kit import DONE, FAR, HELLO, ScriptedServer, event, far_models, head, listening, said, scripted
from gateway_kit import TestBench, events_of, metric, open_bench
from virtual_time import virtual_loop

from headrace.core.ids import RequestId
from headrace.core.sampling import MAX_SEED
from headrace.gateway.upstream.foreign.attempt import ForeignRequest, names_in, refuse, written
from headrace.gateway.upstream.foreign.events import END_OF_STREAM_S, NEXT_CHOICE_S
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

Body = dict[str, Any]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


def counted() -> bytes:
    return event(choices=[], usage=USAGE)


def good(_: Body) -> bytes:
    return head() + said("Hello", "stop") + counted() + DONE


def refused(message: object, *, status: str = "400 Bad Request", **fields: Any) -> bytes:
    return head(status, "application/json") + json.dumps({"error": {"message": message, **fields}}).encode()


def without(name: str, answer: bytes) -> Callable[[Body], bytes]:
    """A server that gives `answer` to a body with the field, however deep inside, and a good one to any other."""
    return lambda body: answer if f'"{name}":' in json.dumps(body) else good(body)


async def chat(bench: TestBench, **fields: Any) -> httpx2.Response:
    return await bench.client.post("/v1/chat/completions", json={"model": FAR, "messages": HELLO, **fields})


def results(bench: TestBench) -> dict[str, float]:
    words = ("ok", "invalid", "lost", "server_error", "refused")
    found = {word: metric(bench.gateway, "headrace_upstream_attempts_total", model=FAR, replica="foreign-0", result=word) for word in words}
    return {word: count for word, count in found.items() if count}


# ------------------------------------------------------------------------------------------------------------------ fields left out

REFUSALS = {
    "OpenAI": refused("Unknown parameter: 'NAME'.", param="NAME", code="unknown_parameter"),
    "older Azure": refused("Unrecognized request argument supplied: NAME", param=None),
    "Mistral": head("422 Unprocessable Entity", "application/json")
    + json.dumps(
        {"object": "error", "message": {"detail": [{"type": "extra_forbidden", "loc": ["body", "NAME"], "msg": "Extra inputs"}]}}
    ).encode(),
    "FastAPI": head("422 Unprocessable Entity", "application/json")
    + json.dumps({"detail": [{"type": "extra_forbidden", "loc": ["body", "NAME"], "msg": "Extra inputs", "input": "seed"}]}).encode(),
    "Gemini": head("400 Bad Request", "application/json")
    + json.dumps([{"error": {"code": 400, "message": 'Invalid JSON payload received. Unknown name "NAME": Cannot find field.'}}]).encode(),
    "TGI": refused("Failed to deserialize: unknown field `NAME`, expected one of `messages`, `seed`, `stop`"),
    "Groq": refused("property 'NAME' is unsupported", type="invalid_request_error"),
    "vLLM": head("400 Bad Request", "application/json")
    + json.dumps({"object": "error", "message": "[{'type': 'extra_forbidden', 'loc': ('body', 'NAME'), 'input': 1}]"}).encode(),
    "a text": head("422 Unprocessable Entity", "application/json") + json.dumps({"detail": "NAME is not permitted"}).encode(),
}


@pytest.mark.parametrize("server_name", REFUSALS)
async def test_a_field_without_meaning_is_left_out_for_a_server_that_refuses_it_by_name(text: TextModel, server_name: str) -> None:
    server = ScriptedServer(answer=without("stream_options", REFUSALS[server_name].replace(b"NAME", b"stream_options")))
    async with scripted(text, server) as near:
        answers = [await chat(near), await chat(near)]
        assert [each.status_code for each in answers] == [200, 200]
        assert [("stream_options" in body) for body in server.bodies] == [True, False, False], "it is learned once"
        assert results(near) == {"ok": 2}


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
@pytest.mark.parametrize(
    "fields",
    [
        {"seed": 5},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"temperature": 0.5},
    ],
)
async def test_a_field_with_a_meaning_is_refused_by_its_name_and_sent_once(text: TextModel, fields: Body, status: str) -> None:
    (name,) = fields
    for refusal in (refused("no", status=status, param=name), refused(f"'{name}' is not supported with this model", status=status)):
        server = ScriptedServer(answer=without(name, refusal))
        async with scripted(text, server) as near:
            error = (await chat(near, **fields)).json()["error"]
            assert (error["param"], error["code"], len(server.bodies)) == (name, "invalid_value", 1)
            assert (await chat(near)).status_code == 200


async def test_calls_one_by_one_are_not_silently_made_several_at_once(text: TextModel) -> None:
    server = ScriptedServer(answer=without("parallel_tool_calls", refused("Unknown parameter: 'parallel_tool_calls'.")))
    tools = [{"type": "function", "function": {"name": "now"}}]
    async with scripted(text, server) as near:
        response = await chat(near, tools=tools, parallel_tool_calls=False)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "parallel_tool_calls")
        assert (await chat(near, tools=tools)).status_code == 200


async def test_what_a_client_quotes_teaches_nothing(text: TextModel) -> None:
    """A field that is refused for its value is left out for this request alone."""
    for refusal in (refused("'stream_options' is too long - 'user'"), refused("'stream_options' is too long", param="user")):
        server = ScriptedServer(answer=lambda body, refusal=refusal: refusal if "user" in body else good(body))  # type: ignore[misc]
        async with scripted(text, server) as near:
            assert (await chat(near, user="stream_options")).status_code == 200
            assert (await chat(near)).status_code == 200
            assert [("user" in body, "stream_options" in body) for body in server.bodies] == [(True, True), (False, True), (False, True)]
            await chat(near, user="u")
            assert server.bodies[3]["user"] == "u"


async def test_an_answer_proves_only_the_last_field_that_was_left_out(text: TextModel) -> None:
    """The first refusal may have been misread: the server refused the request without that field too."""

    def answer(body: Body) -> bytes:
        if "user" not in body:
            return good(body)
        field = "stream_options" if "stream_options" in body else "user"
        return refused(f"Unknown parameter: '{field}'.", param=field)

    server = ScriptedServer(answer=answer)
    async with scripted(text, server) as near:
        assert (await chat(near, user="u")).status_code == 200
        assert (await chat(near, user="u")).status_code == 200
        assert len(server.bodies) == 4
        assert ("user" in server.bodies[-1], "stream_options" in server.bodies[-1]) == (False, True)


async def test_fields_that_a_server_does_not_know_are_learned_one_by_one(text: TextModel) -> None:
    def answer(body: Body) -> bytes:
        field = next((name for name in ("stream_options", "user", "prompt_cache_key") if name in body), None)
        return good(body) if field is None else refused(f"Unknown parameter: '{field}'.", param=field)

    server = ScriptedServer(answer=answer)
    async with scripted(text, server) as near:
        for num_sent in (4, 3, 2, 1):
            server.bodies.clear()
            assert (await chat(near, user="u", prompt_cache_key="k")).status_code == 200
            assert len(server.bodies) == num_sent


async def test_a_refusal_that_stays_is_given_up_and_nothing_is_learned_from_it(text: TextModel) -> None:
    server = ScriptedServer(answer=lambda _: refused("stream_options and max_tokens and everything else"))
    async with scripted(text, server) as near:
        for _ in range(6):
            assert (await chat(near, max_tokens=5)).status_code == 400
        server.answer = good
        assert (await chat(near, max_tokens=5)).status_code == 200, "the circuit is closed"
        assert server.bodies[-1]["max_tokens"] == 5
        assert "stream_options" in server.bodies[-1]


async def test_a_servers_text_is_searched_and_never_shown(text: TextModel) -> None:
    server = ScriptedServer(answer=lambda _: refused("secret 'temperature' at 10.0.0.7", param="temperature"))
    async with scripted(text, server) as near:
        response = await chat(near, temperature=0.5)
        assert response.json()["error"]["param"] == "temperature"
        assert "secret" not in response.text


# ------------------------------------------------------------------------------------------------------------------ names of the limit

UNSUPPORTED = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."


def limits(server: ScriptedServer) -> list[Body]:
    return [{name: value for name, value in body.items() if name.startswith("max_")} for body in server.bodies]


async def test_the_limit_has_the_name_that_the_client_wrote_or_the_one_that_the_server_knows(text: TextModel) -> None:
    reasoning = ScriptedServer(answer=without("max_tokens", refused(UNSUPPORTED, param="max_tokens")))
    older = ScriptedServer(
        answer=without("max_completion_tokens", refused("Unrecognized request argument supplied: max_completion_tokens"))
    )
    for server, own, other in ((reasoning, "max_completion_tokens", "max_tokens"), (older, "max_tokens", "max_completion_tokens")):
        async with scripted(text, server) as near:
            assert (await chat(near, **{own: 50})).status_code == 200
            assert limits(server) == [{own: 50}]
            for _ in range(2):
                assert (await chat(near, **{other: 50})).status_code == 200
            assert limits(server)[1:] == [{other: 50}, {own: 50}, {own: 50}]
            assert (await chat(near, max_tokens=50, max_completion_tokens=50)).status_code == 200
            assert limits(server)[-1] == {own: 50}


async def test_a_server_that_ignores_the_newer_name_is_sent_the_older_one_from_then_on(text: TextModel) -> None:
    server = ScriptedServer(answer=lambda _: head() + said("Hello", "stop") + event(choices=[], usage={"completion_tokens": 900}) + DONE)
    async with scripted(text, server) as near:
        for _ in range(2):
            await chat(near, max_completion_tokens=50)
        assert limits(server) == [{"max_completion_tokens": 50}, {"max_tokens": 50}]


LARGE = [
    refused("max_tokens is too large: 50. This model supports at most 4 completion tokens.", param="max_tokens", code="invalid_value"),
    refused("Invalid max_tokens value, the valid range of max_tokens is [1, 4]"),
    refused("max_tokens: 50 > 4, which is the maximum allowed number of output tokens"),
    refused("no", param="max_tokens"),
]


@pytest.mark.parametrize("refusal", LARGE)
async def test_a_limit_whose_value_is_refused_is_sent_once_and_teaches_nothing(text: TextModel, refusal: bytes) -> None:
    """A server that ignores the other name would give a longer answer, to this client or to any later one."""

    def answer(body: Body) -> bytes:
        name = next((name for name in body if name.startswith("max_") and body[name] > 4), "")
        return refusal.replace(b"max_tokens", name.encode()) if name else good(body)

    server = ScriptedServer(answer=answer)
    async with scripted(text, server) as near:
        for name in ("max_completion_tokens", "max_tokens"):
            response = await chat(near, **{name: 50})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name)
            assert (await chat(near, **{name: 4})).status_code == 200
        assert limits(server) == [{name: limit} for name in ("max_completion_tokens", "max_tokens") for limit in (50, 4)]


async def test_a_server_that_refused_a_name_of_the_limit_is_not_sent_it_for_a_long_answer(text: TextModel) -> None:
    """Some servers count reasoning beside the limit."""
    long = head() + said("Hello", "stop") + event(choices=[], usage={"completion_tokens": 900}) + DONE
    server = ScriptedServer(answer=lambda body: refused(UNSUPPORTED, param="max_tokens") if "max_tokens" in body else long)
    async with scripted(text, server) as near:
        for _ in range(3):
            assert (await chat(near, max_tokens=50)).status_code == 200
        assert limits(server) == [{"max_tokens": 50}, *[{"max_completion_tokens": 50}] * 3]


# ------------------------------------------------------------------------------------------------------------------------- choices


def numbered(bodies: list[Body]) -> Callable[[Body], bytes]:
    """A server that ignores `n`: one choice, with a text of its own."""

    def answer(body: Body) -> bytes:
        bodies.append(body)
        return head() + said(f"answer {len(bodies)}", "stop") + counted() + DONE

    return answer


def texts_of(response: httpx2.Response, *, is_streaming: bool) -> dict[int, str]:
    found: dict[int, str] = {}
    chunks = events_of(response.text) if is_streaming else [response.json()]
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        piece = choice.get("delta") or choice.get("message") or choice
        found[choice["index"]] = found.get(choice["index"], "") + (piece.get("content") or piece.get("text") or "")
    return found


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_server_that_ignores_n_is_asked_for_each_choice(text: TextModel, is_streaming: bool) -> None:
    bodies: list[Body] = []
    more = {"stream": True, "stream_options": {"include_usage": True}} if is_streaming else {}
    async with scripted(text, ScriptedServer(answer=numbered(bodies))) as near:
        response = await chat(near, n=3, seed=40, **more)
        assert texts_of(response, is_streaming=is_streaming) == {0: "answer 1", 1: "answer 2", 2: "answer 3"}
        usage = events_of(response.text)[-1]["usage"] if is_streaming else response.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (21, 9), "what the server was paid for"
        assert [(body.get("n"), body["seed"]) for body in bodies] == [(3, 40), (None, 41), (None, 42)]
        assert texts_of(await chat(near, n=2), is_streaming=False) == {0: "answer 4", 1: "answer 5"}
        assert [body.get("n") for body in bodies[3:]] == [None, None], "it is known from then on"
        assert results(near) == {"ok": 5}


@pytest.mark.parametrize(
    "refusal",
    [
        refused("n must be 1", param="n"),
        refused("n must be 1 when using greedy sampling, got 3."),
        refused("'n' : number must be at most 1"),
        refused("Only one completion choice is allowed", status="500 Internal Server Error"),
    ],
)
async def test_a_server_that_refuses_a_number_of_choices_is_asked_for_each_of_them(text: TextModel, refusal: bytes) -> None:
    server = ScriptedServer(answer=lambda body: refusal if body.get("n", 1) > 2 else good(body))
    async with scripted(text, server) as near:
        assert len((await chat(near, n=3)).json()["choices"]) == 3
        assert [body.get("n") for body in server.bodies] == [3, None, None, None]
        await chat(near, n=2)
        assert server.bodies[4]["n"] == 2, "the number was one client's"


async def test_a_server_that_does_not_know_n_is_not_sent_it_again(text: TextModel) -> None:
    server = ScriptedServer(answer=without("n", refused("Unrecognized request argument supplied: 'n'")))
    async with scripted(text, server) as near:
        for _ in range(2):
            assert len((await chat(near, n=2)).json()["choices"]) == 2
        assert [body.get("n") for body in server.bodies] == [2, None, None, None, None]
        assert results(near) == {"ok": 4}


async def test_prompts_of_ids_are_still_sent_at_once_to_a_server_that_refuses_a_number_of_choices(text: TextModel) -> None:
    def answer(body: Body) -> bytes:
        if body.get("n", 1) > 1:
            return refused("n must be 1 when using greedy sampling")
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = [{"index": index, "text": "x", "finish_reason": "stop"} for index in range(len(prompts))]
        return head() + event(choices=choices) + counted() + DONE

    server = ScriptedServer(answer=answer)
    async with scripted(text, server) as near:
        await near.client.post("/v1/completions", json={"model": FAR, "prompt": [5, 6], "n": 2})
        response = await near.client.post("/v1/completions", json={"model": FAR, "prompt": [[5], [6]]})
        assert len(response.json()["choices"]) == 2
        assert server.bodies[-1]["prompt"] == [[5], [6]]


@pytest.mark.parametrize("more", [{}, {"repeat": b": ping\n\n", "pause_s": 0.02}], ids=["is silent", "goes on"])
async def test_the_choices_of_a_server_that_ignores_n_and_never_ends_are_whole(text: TextModel, more: Body) -> None:
    server = ScriptedServer(head(), said("one "), said("two", "stop"), hangs=True, **more)
    async with scripted(text, server) as near:
        for num_requests in (3, 6):  # it may have been slow: nothing is learned
            began = virtual_loop().time()
            assert texts_of(await chat(near, n=3), is_streaming=False) == dict.fromkeys(range(3), "one two")
            assert virtual_loop().time() - began == pytest.approx(NEXT_CHOICE_S + 2 * END_OF_STREAM_S, abs=0.2)
            assert len(server.bodies) == num_requests
        assert results(near) == {"ok": 6}


async def test_a_choice_may_begin_long_after_another_has_ended(text: TextModel) -> None:
    pieces = [said("one", "stop", 0), said("two", None, 1), said("!", "stop", 1) + DONE]
    server = ScriptedServer(head(), *pieces, pause_s=0.9 * NEXT_CHOICE_S)
    async with scripted(text, server) as near:
        assert texts_of(await chat(near, n=2), is_streaming=False) == {0: "one", 1: "two!"}
        assert len(server.bodies) == 1


@pytest.mark.parametrize("end", [b"", b"data: {\n\n"])
async def test_a_server_that_is_lost_before_its_next_choice_has_broken_off(text: TextModel, end: bytes) -> None:
    lost = head("200 OK", "text/event-stream", "content-length: 100000")
    server = ScriptedServer(lost, said("one", "stop", 0), end)
    async with scripted(text, server) as near:
        assert (await chat(near, n=2)).status_code == 503
        assert len(server.bodies) == 1


async def test_the_sum_of_all_counts_fits_the_records(text: TextModel) -> None:
    most = event(choices=[], usage={"prompt_tokens": 2**27, "completion_tokens": 2**27})
    async with scripted(text, ScriptedServer(head() + said("x", "stop") + most + DONE)) as near:
        usage = (await chat(near, n=40)).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2**32 - 1, 2**32 - 1)


async def test_the_choices_that_came_are_kept_where_a_server_gives_some_of_them(text: TextModel) -> None:
    first = head() + said("a", "stop", 0) + said("c", "stop", 2) + counted() + DONE
    server = ScriptedServer(answer=lambda body: first if body.get("n") == 4 else head() + said("x", "stop") + counted() + DONE)
    async with scripted(text, server) as near:
        assert texts_of(await chat(near, n=4), is_streaming=False) == {0: "a", 1: "x", 2: "c", 3: "x"}
        assert len(server.bodies) == 3


async def test_a_choice_that_began_and_broke_off_is_a_failure_and_no_missing_choice(text: TextModel) -> None:
    server = ScriptedServer(answer=lambda _: head() + said("a", "stop", 0) + said("b", None, 1) + DONE)
    async with scripted(text, server) as near:
        assert (await chat(near, n=2)).status_code == 503
        assert [body.get("n") for body in server.bodies] == [2]


async def test_several_prompts_with_several_choices_are_asked_one_by_one(text: TextModel) -> None:
    def answer(body: Body) -> bytes:
        choice = {"index": 0, "text": f"of {body['prompt']}", "finish_reason": "stop"}
        return head() + event(choices=[choice]) + counted() + DONE

    server = ScriptedServer(answer=answer)
    async with scripted(text, server) as near:
        body = {"model": FAR, "prompt": ["one", "two"], "n": 2}
        response = await near.client.post("/v1/completions", json=body)
        assert texts_of(response, is_streaming=False) == {0: "of one", 1: "of one", 2: "of two", 3: "of two"}
        assert response.json()["usage"]["prompt_tokens"] == 28
        response = await near.client.post("/v1/completions", json={"model": FAR, "prompt": ["one", "two", "six"]})
        assert texts_of(response, is_streaming=False)[2] == "of six"
        assert [body["prompt"] for body in server.bodies[-3:]] == [["one", "two", "six"], "two", "six"]


async def test_a_choice_that_fails_for_the_moment_is_asked_again_and_the_others_are_not(text: TextModel) -> None:
    busy = head("503 Service Unavailable", "text/plain")
    server = ScriptedServer(answer=good, before=(good({}), busy))
    async with scripted(text, server) as near:
        assert len((await chat(near, n=2)).json()["choices"]) == 2
        assert results(near) == {"ok": 2, "server_error": 1}


# ---------------------------------------------------------------------------------------------------------------------------- parts


def request(num_prompts: int = 1, n: int = 1, **fields: Any) -> ForeignRequest:
    fields |= {"n": n} if n > 1 else {}
    num_sequences = num_prompts * n
    return ForeignRequest(
        request_id=RequestId("r"), path="x", fields=fields, salt=b"", num_prompts=num_prompts, num_sequences=num_sequences
    )


@pytest.mark.pure
def test_a_request_is_written_for_any_of_its_sequences() -> None:
    lists = request(3, prompt=[[1], [2], [3]])
    assert [list(part) for part in lists.parts()] == [[0, 1, 2]]
    assert lists.fields_of([1, 2]) == {"prompt": [[2], [3]]}
    assert lists.fields_of([2]) == {"prompt": [3]}
    several = request(2, n=3, prompt=["a", "b"], seed=MAX_SEED)
    assert [list(part) for part in several.parts()] == [[0, 1, 2], [3, 4, 5]]
    assert several.fields_of(range(3, 6)) == {"prompt": "b", "n": 3, "seed": MAX_SEED}
    assert several.fields_of([5]) == {"prompt": "b", "n": 1, "seed": MAX_SEED - 2}
    for takes_one_prompt in (False, True):
        assert several.share([3, 4], {"n"}, takes_one_prompt=takes_one_prompt) == [3]
        assert several.share([3, 4], {"prompt"}, takes_one_prompt=takes_one_prompt) == [3, 4]
        assert lists.share([1, 2], {"n"}, takes_one_prompt=takes_one_prompt) == ([1] if takes_one_prompt else [1, 2])


@pytest.mark.pure
def test_one_name_of_the_limit_is_always_left() -> None:
    taken: set[str] = set()
    for name in ("max_tokens", "max_completion_tokens", "max_tokens"):
        refuse(taken, name)
        assert taken == {name}
    assert written({"max_tokens": 5}, taken) == {"max_completion_tokens": 5}


# ------------------------------------------------------------------------------------------------------------- what is passed on

MARK = {"type": "ephemeral", "ttl": "1h"}
EXTRA = {"google": {"thought_signature": "c2lnbmF0dXJl"}}
CALL: Body = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
SIGNED_CALL: Body = {**CALL, "extra_content": EXTRA}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
DETAILS: list[Body] = [
    {"type": "reasoning.text", "text": "first ", "signature": None, "index": 0},
    {"type": "reasoning.text", "text": "then", "signature": "s", "index": 0},
    {"type": "reasoning.encrypted", "data": "ZGF0YQ==", "index": 1},
]


async def test_marks_reach_the_server_as_they_were_written(text: TextModel) -> None:
    server = ScriptedServer(answer=good)
    messages: list[Body] = [
        {"role": "system", "content": [{"type": "text", "text": "Long.", "cache_control": MARK, "prompt_cache_breakpoint": {"a": 1}}]},
        {"role": "user", "content": "Hi", "cache_control": MARK},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**CALL, "extra_content": EXTRA}],
            "reasoning": "hm",
            "reasoning_details": DETAILS,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "assistant", "content": "Rain.", "extra_content": EXTRA, "thinking_blocks": [{"type": "thinking", "signature": "s"}]},
        {"role": "user", "content": "Thanks"},
    ]
    tools = [{**TOOLS[0], "cache_control": MARK}, {"type": "function", "function": {"name": "now", "cache_control": MARK}}]
    fields = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "s", "user": "u", "cache_control": MARK}
    async with scripted(text, server) as near:
        response = await chat(near, messages=messages, tools=tools, **fields)
        (sent,) = server.bodies
        assert response.status_code == 200
        expected = [{**message, "reasoning_content": "hm"} if "reasoning" in message else message for message in messages]
        assert sent["messages"] == expected
        assert sent["tools"] == tools
        assert {name: sent[name] for name in fields} == fields
        assert "x-headrace-ignored" not in response.headers
        response = await near.client.post("/v1/completions", json={"model": FAR, "prompt": "x", "user": "u", "prompt_cache_key": "k"})
        assert (server.bodies[-1]["user"], server.bodies[-1]["prompt_cache_key"]) == ("u", "k")


async def test_our_engines_are_shown_no_marks_and_the_client_is_told(text: TextModel) -> None:
    marked: Body = {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": MARK}], "extra_content": EXTRA}
    async with open_bench(text) as bench:
        plain = await bench.chat(messages=HELLO)
        response = await bench.chat(messages=[marked], prompt_cache_retention="24h", prompt_cache_key="k")
        assert response.status_code == plain.status_code == 200
        first, second = bench.replica.requests
        assert second.prompt_ids == first.prompt_ids
        named = response.headers["x-headrace-ignored"].split(", ")
        assert set(named) == {
            "messages[].content[].cache_control",
            "messages[].extra_content",
            "prompt_cache_retention",
            "prompt_cache_key",
        }


@pytest.mark.parametrize("name", ["cache_control", "extra_content", "reasoning_content", "user", "prompt_cache_key"])
async def test_a_mark_that_a_server_does_not_know_is_left_out_for_it(text: TextModel, name: str) -> None:
    where = name if name in ("user", "prompt_cache_key") else f"messages[1].{name}"
    server = ScriptedServer(answer=without(name, refused(f"Unknown parameter: '{where}'.", param=where)))
    answer: Body = {"role": "assistant", "content": "x", "extra_content": EXTRA, "reasoning_content": "hm", "cache_control": MARK}
    schema = {"type": "object", "properties": {"extra": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    async with scripted(text, server) as near:
        for _ in range(2):
            response = await chat(near, messages=[*HELLO, answer, *HELLO], user="u", prompt_cache_key="k", tools=tools)
            assert response.status_code == 200
        assert len(server.bodies) == 3
        assert server.bodies[-1]["tools"] == tools


@pytest.mark.parametrize("place", ["body", "messages", "tools"])
async def test_a_mark_is_left_out_where_the_server_does_not_know_it_and_kept_elsewhere(text: TextModel, place: str) -> None:
    marked = {
        "body": {"cache_control": MARK},
        "messages": [{**HELLO[0], "cache_control": MARK}],
        "tools": [{**TOOLS[0], "cache_control": MARK}],
    }
    where = {"body": "cache_control", "messages": "messages[0].cache_control", "tools": "tools[0].cache_control"}[place]

    def has_mark(body: Body, place: str) -> bool:
        return "cache_control" in (body if place == "body" else body[place][0])

    refusal = refused(f"Unknown parameter: '{where}'.", param=where)
    server = ScriptedServer(answer=lambda body: refusal if has_mark(body, place) else good(body))
    async with scripted(text, server) as near:
        for _ in range(2):
            assert (await chat(near, messages=marked["messages"], tools=marked["tools"], cache_control=MARK)).status_code == 200
        assert len(server.bodies) == 3
        assert {each for each in marked if has_mark(server.bodies[-1], each)} == set(marked) - {place}


@pytest.mark.pure
def test_marks_are_found_where_they_can_be_left_out_and_not_in_texts_and_schemas() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": 'my "cache_control": x', "extra_content": 1}]}]
    tools = [{"function": {"name": "cache_control", "parameters": {"properties": {"cache_control": {}}}}}]
    assert names_in({"messages": messages, "tools": tools}) == {"messages", "tools", "messages.extra_content"}


async def test_a_request_is_adapted_three_times_and_then_the_last_refusal_stands(text: TextModel) -> None:
    names = ["user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]

    def answer(body: Body) -> bytes:
        name = next((name for name in names if name in body), None)
        return good(body) if name is None else refused("no", param=name)

    server = ScriptedServer(answer=answer)
    async with scripted(text, server) as near:
        response = await chat(near, **dict.fromkeys(names[:3], "x"), prompt_cache_retention="24h")
        assert (response.status_code, response.json()["error"]["param"], len(server.bodies)) == (400, names[-1], 4)


async def test_all_forms_of_a_request_have_one_deadline(text: TextModel) -> None:
    """The server is silent after a second form."""
    server = ScriptedServer(answer=lambda body: refused("no", param="user") if "user" in body else b"", hangs=True, pause_s=8.0)
    async with scripted(text, server, silence_s=10.0) as near:
        began = virtual_loop().time()
        assert (await chat(near, user="u")).status_code == 503
        assert virtual_loop().time() - began < 11.0


@pytest.mark.parametrize("content", ["Hello", "what is cache_salt?"])
async def test_only_a_server_that_refuses_the_salt_is_said_to(text: TextModel, content: str, caplog: pytest.LogCaptureFixture) -> None:
    answer = refused(f"{'Invalid message:' if '?' in content else 'Unknown parameter:'} cache_salt")
    async with scripted(text, ScriptedServer(answer=lambda _: answer)) as near:
        assert (await chat(near, messages=[{"role": "user", "content": content}])).status_code == 400
        assert ("tenants share" in caplog.text) == (content == "Hello")


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])


SIGNED = {
    "with the call": (delta(tool_calls=[{"index": 0, **CALL, "extra_content": EXTRA}]),),
    "behind the call": (delta(tool_calls=[{"index": 0, **CALL}]), delta(tool_calls=[{"index": 0, "extra_content": EXTRA}])),
    "before the arguments": (
        delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "weather"}, "extra_content": EXTRA}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"city":"Oslo"}'}}]),
    ),
    "in an odd chunk": (delta(tool_calls=[{"index": "0", **CALL, "extra_content": EXTRA}]),),
    "in a message": (event(choices=[{"index": 0, "message": {"role": "assistant", "tool_calls": [{**CALL, "extra_content": EXTRA}]}}]),),
}


@pytest.mark.parametrize("name", SIGNED)
async def test_a_calls_signature_comes_back_with_its_call(text: TextModel, name: str) -> None:
    async with scripted(text, ScriptedServer(head(), *SIGNED[name], delta("tool_calls"), DONE)) as near:
        (call,) = (await chat(near, tools=TOOLS)).json()["choices"][0]["message"]["tool_calls"]
        assert call == {**CALL, "extra_content": EXTRA}
        chunks = events_of((await chat(near, tools=TOOLS, stream=True)).text)
        pieces = [piece for chunk in chunks for choice in chunk["choices"] for piece in choice["delta"].get("tool_calls", [])]
        assert [piece["extra_content"] for piece in pieces if "extra_content" in piece] == [EXTRA]
        assert all(isinstance(piece["function"]["arguments"], str) for piece in pieces)


async def test_reasoning_that_a_server_wants_back_reaches_the_client(text: TextModel) -> None:
    pieces = [delta(reasoning_details=[detail]) for detail in DETAILS]
    server = ScriptedServer(head(), *pieces, delta(content="Hi"), delta("stop", extra_content=EXTRA), DONE)
    async with scripted(text, server) as near:
        message = (await chat(near)).json()["choices"][0]["message"]
        assert message["reasoning_details"] == [{**DETAILS[1], "text": "first then"}, DETAILS[2]]
        assert (message["content"], message["extra_content"], message["reasoning_content"]) == ("Hi", EXTRA, "first then")
        chunks = events_of((await chat(near, stream=True)).text)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert [detail for each in deltas for detail in each.get("reasoning_details", [])] == DETAILS
        assert [each["extra_content"] for each in deltas if "extra_content" in each] == [EXTRA]
        hidden = (await chat(near, include_reasoning=False)).json()["choices"][0]["message"]
        assert ("reasoning_details" in hidden, hidden["extra_content"]) == (False, EXTRA)


async def test_what_is_passed_on_is_bounded_and_what_is_left_out_is_counted(text: TextModel) -> None:
    large = {"google": {"thought_signature": "x" * 300_000}}
    server = ScriptedServer(head(), *[delta(tool_calls=[{"index": 0, **CALL, "extra_content": large}])] * 5, delta("tool_calls"), DONE)
    async with scripted(text, server) as near:
        response = await chat(near, tools=TOOLS)
        assert response.status_code == 200
        assert len(response.content) < 1_100_000
        left = metric(near.gateway, "headrace_upstream_fields_left_out_total", model=FAR, replica="foreign-0", field="signature")
        assert left == 2
        response = await chat(near, messages=[{**HELLO[0], "extra_content": large}])
        assert (response.status_code, response.json()["error"]["param"]) == (413, "messages[0].extra_content")


async def test_a_session_keeps_the_signatures_of_its_calls(text: TextModel) -> None:
    server = ScriptedServer(head(), *SIGNED["with the call"], delta("tool_calls"), DONE)
    async with listening(server) as ports, open_bench(text, models=far_models(*ports), sessions={"ttl_s": 60}) as near:
        headers = {"x-session-id": "s1"}
        body = {"model": FAR, "tools": TOOLS}
        await near.client.post("/v1/chat/completions", json={**body, "messages": HELLO}, headers=headers)
        result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
        response = await near.client.post("/v1/chat/completions", json={**body, "messages": [result]}, headers=headers)
        assert response.status_code == 200, response.text
        assert server.bodies[-1]["messages"][1]["tool_calls"][0]["extra_content"] == EXTRA
