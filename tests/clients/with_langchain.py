"""Tries langchain-openai: answers, streams, bound tools and structured output."""

from __future__ import annotations

from typing import Any, Literal

from cases import ANSWER_TOKENS, MODEL, QUESTION, one, run, same
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city and its country. Values are bounded, so that a small model comes to an end."""

    name: Literal["Paris", "Rome", "Oslo"]
    country: Literal["France", "Italy", "Norway"]


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


MODEL_OF = ChatOpenAI(model=MODEL, temperature=0, max_completion_tokens=ANSWER_TOKENS)
TOOL = StructuredTool.from_function(get_weather)
ASKED = "Answer in JSON with name and country: what is the capital of France?"


def name_called(**bound: Any) -> object:
    call: Any = one(MODEL_OF.bind_tools([TOOL], **bound).invoke(QUESTION).tool_calls)
    return same((call["name"], list(call["args"])), ("get_weather", ["city"]))


def streamed_text() -> object:
    pieces = [str(chunk.content) for chunk in MODEL_OF.stream("Hello!")]
    return same("".join(pieces), MODEL_OF.invoke("Hello!").content)


def streamed_call() -> object:
    whole: Any = None
    for chunk in MODEL_OF.bind_tools([TOOL], tool_choice="any").stream(QUESTION):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    call: Any = one(whole.tool_calls)
    return same((call["name"], list(call["args"])), ("get_weather", ["city"]))


def loop() -> object:
    bound = MODEL_OF.bind_tools([TOOL], tool_choice="any")
    messages: list[Any] = [HumanMessage(QUESTION)]
    messages.append(bound.invoke(messages))
    messages += [TOOL.invoke(call) for call in messages[-1].tool_calls]
    return MODEL_OF.bind_tools([TOOL]).invoke(messages).content


def structured(method: Any, **more: Any) -> object:
    return MODEL_OF.with_structured_output(City, method=method, **more).invoke(ASKED)


run(
    bound={
        "invoke": lambda: MODEL_OF.invoke("Hello!").content,
        "stream": streamed_text,
        "bind_tools, tool_choice any": lambda: name_called(tool_choice="any"),
        "bind_tools, tool_choice by name": lambda: name_called(tool_choice="get_weather"),
        "bind_tools, streamed": streamed_call,
        "tool results sent back": loop,
        "with_structured_output, json_schema": lambda: structured("json_schema"),
        "with_structured_output, json_schema, strict": lambda: structured("json_schema", strict=True),
        "with_structured_output, function_calling": lambda: structured("function_calling"),
    },
    free={
        "bind_tools": lambda: name_called(),
        "bind_tools, strict": lambda: name_called(strict=True),
        "bind_tools, parallel_tool_calls false": lambda: name_called(parallel_tool_calls=False),
        "with_structured_output, json_mode": lambda: structured("json_mode"),
    },
)
