"""Tests functions end to end: `headrace serve` of the bundled model, the official `openai` client, the example and the agent."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import hostile_tools
import jsonschema
import openai
import pytest
from openai import APIStatusError, BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel
from server_kit import Server

from tests.house.reader import ROOT
from tests.house.test_docs import code_blocks

pytestmark = pytest.mark.process

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in (WEATHER, TIME)}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client(pair: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{pair.port}/v1", api_key="none", max_retries=0, timeout=60.0) as opened:
        yield opened


def check_calls(message: Any, *, at_most: int = 128) -> None:
    assert message.tool_calls
    assert len(message.tool_calls) <= at_most
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    for call in message.tool_calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_forced_calls_validate_whatever_the_model_would_rather_say(client: OpenAI, choice: Any, temperature: float) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model="pair", messages=ASKED, tools=[WEATHER, TIME], tool_choice=choice, temperature=temperature, seed=seed, max_tokens=200
        )
        (chosen,) = answer.choices
        if chosen.finish_reason == "length":  # a hot model may go on calling
            assert choice == "required"
            continue
        assert chosen.finish_reason == "tool_calls"
        assert not (chosen.message.content or "").strip()
        check_calls(chosen.message, at_most=1 if choice == NAMED else 128)


def test_one_call_where_several_are_not_wanted(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="pair", messages=ASKED, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False, temperature=1.5, n=4, seed=1
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        check_calls(choice.message, at_most=1)


def test_a_streamed_call_is_the_whole_one(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "pair",
        "messages": ASKED,
        "tools": [WEATHER, TIME],
        "tool_choice": NAMED,
        "temperature": 0,
        "seed": 1,
    }
    whole = client.chat.completions.create(**asked).choices[0].message
    assert whole.tool_calls
    names, arguments, ids = [], "", []
    finish = None
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            for piece in choice.delta.tool_calls or []:
                assert piece.index == 0
                assert piece.function is not None
                names += [piece.function.name] if piece.function.name else []
                ids += [piece.id] if piece.id else []
                assert piece.function.arguments is not None
                arguments += piece.function.arguments
    function: Any = whole.tool_calls[0]
    assert (names, arguments, finish) == (["get_weather"], function.function.arguments, "tool_calls")
    assert len(ids) == 1


def test_the_clients_stream_helper_follows_the_arguments(client: OpenAI) -> None:
    with client.chat.completions.stream(model="pair", messages=ASKED, tools=[WEATHER], tool_choice="required", temperature=0) as stream:
        kinds = [event.type for event in stream]
        final: Any = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    check_calls(final)


def test_a_strict_function_validates_where_the_model_decides(client: OpenAI) -> None:
    strict: Any = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    answer = client.chat.completions.create(model="pair", messages=ASKED, tools=[strict], temperature=0, max_tokens=200)
    (choice,) = answer.choices
    if choice.message.tool_calls:  # what the model decides is its own business
        check_calls(choice.message)
        assert choice.finish_reason == "tool_calls"
    else:
        assert "<tool_call>" not in (choice.message.content or "")


def test_without_functions_to_call_the_text_stays_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="pair", messages=ASKED, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=40)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_document_or_calls(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"sky": {"enum": ["grey", "blue"]}}, "required": ["sky"], "additionalProperties": False}
    strict: Any = {**TIME, "function": {**TIME["function"], "strict": True}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="pair", messages=ASKED, tools=[strict], response_format=form, temperature=1.2, seed=seed, max_tokens=200
        )
        (choice,) = answer.choices
        if choice.message.tool_calls:
            check_calls(choice.message)
        elif choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), schema)


def test_results_of_calls_go_back_to_the_model(client: OpenAI) -> None:
    said = (
        client.chat.completions.create(model="pair", messages=ASKED, tools=[WEATHER], tool_choice=NAMED, temperature=0).choices[0].message
    )
    assert said.tool_calls
    turns: list[Any] = [
        *ASKED,
        said.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "rain"},
    ]
    answer = client.chat.completions.create(model="pair", messages=turns, tools=[WEATHER], temperature=0, max_tokens=40)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert answer.usage is not None
    counted: Any = client.post("/tokenize", cast_to=object, body={"model": "pair", "messages": turns, "tools": [WEATHER]})
    assert answer.usage.prompt_tokens == counted["count"]


class Weather(BaseModel):
    """Weather of a city"""

    city: Literal["Paris", "Rome"]


@pytest.mark.parametrize("helper", ["create", "parse", "stream"])
@pytest.mark.parametrize("is_dumped", [False, True])
def test_a_message_of_each_helper_of_the_client_can_be_sent_back(client: OpenAI, helper: str, is_dumped: bool) -> None:
    """As the client's own examples do: messages.append(completion.choices[0].message)."""
    asked: dict[str, Any] = {"model": "pair", "messages": ASKED, "tools": [pydantic_function_tool(Weather)], "temperature": 0}
    if helper == "stream":
        with client.chat.completions.stream(**asked, tool_choice="required") as stream:
            said: Any = stream.get_final_completion().choices[0].message
    else:
        said = getattr(client.chat.completions, helper)(**asked, tool_choice="required").choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "rain"}
    message = said.model_dump(exclude_none=True) if is_dumped else said
    answer = client.chat.completions.create(**{**asked, "messages": [*ASKED, message, result]}, max_tokens=20)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_schema_that_cannot_bind_costs_its_request_alone(client: OpenAI) -> None:
    odd: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$ref": "https://example.com/schema"}}}
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model="pair", messages=ASKED, tools=[odd], tool_choice="required")
    assert refused.value.param == "tools"
    assert client.chat.completions.create(model="pair", messages=ASKED, max_tokens=2).choices


def status_of(client: OpenAI, body: dict[str, Any]) -> int:
    try:
        client.post("/chat/completions", cast_to=object, body=body)
    except APIStatusError as error:
        return error.status_code
    return 200


def test_hostile_schemas_cost_their_requests_alone(pair: Server, client: OpenAI) -> None:
    """Each is refused by name or served, in its turn; the engines are the ones that they were, and a neighbour's answer is the same.

    Every second one is strict, where the model decides; the others are required.
    """
    neighbour: dict[str, Any] = {"model": "pair", "messages": ASKED, "temperature": 0, "max_tokens": 20}
    before = client.chat.completions.create(**neighbour).choices[0].message.content
    engines = [pair.load(name).instance_id for name in ("e0", "e1")]
    for number, (name, tools) in enumerate(hostile_tools.requests().items()):
        is_strict = number % 2 == 1
        given: Any = [{**tool, "function": {**tool["function"], "strict": is_strict}} for tool in tools]
        body = {"model": "pair", "messages": ASKED, "tools": given, "max_tokens": 3}
        body |= {} if is_strict else {"tool_choice": "required"}
        assert status_of(client, body) in (200, 400, 413), name
    assert client.chat.completions.create(**neighbour).choices[0].message.content == before
    assert [pair.load(name).instance_id for name in ("e0", "e1")] == engines


@pytest.fixture
def programs_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run in this process, which ends later than they think: their clients are closed for them."""
    with ExitStack() as stack:
        monkeypatch.setattr(openai, "OpenAI", lambda **options: stack.enter_context(OpenAI(**options)))
        yield


@pytest.mark.usefixtures("programs_clients")
def test_the_example_calls_local_functions(pair: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{pair.port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(sys, "argv", ["agent.py", "What is the weather in Rome?"])
    runpy.run_path(str(ROOT / "examples" / "agent.py"), run_name="__main__")
    printed = capsys.readouterr()
    assert "get_weather(" in printed.err
    assert printed.out.strip()


@pytest.mark.usefixtures("programs_clients")
def test_the_example_in_the_docs_calls_local_functions(pair: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, block),) = code_blocks(ROOT / "docs" / "tools.md", "python")
    (promised,) = re.findall(r"\)  # (.+)", block)
    program = tmp_path / "program.py"
    program.write_text(block.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{pair.port}").replace('"headrace-tiny"', '"pair"'))
    runpy.run_path(str(program), run_name="__main__")
    assert promised in capsys.readouterr().out


def test_the_agent_calls_local_functions(pair: Server) -> None:
    command = [sys.executable, "-m", "headrace", "agent", "--tool", str(ROOT / "examples" / "weather.py")]
    command += ["--url", f"http://127.0.0.1:{pair.port}"]
    done = subprocess.run(command, input="What is the weather in Rome?\n", capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "-> get_weather(" in done.stderr
    assert done.stdout.strip()
