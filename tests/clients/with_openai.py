"""Tries the official client's helpers: parse and stream."""

from __future__ import annotations

from typing import Any, Literal

from cases import ANSWER_TOKENS, MODEL, QUESTION, one, run, same
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class GetWeather(BaseModel):
    """The weather in a city."""

    city: str


class Sky(BaseModel):
    """Values are bounded, so that a small model comes to an end."""

    colour: Literal["grey", "blue"]
    is_warm: bool


CLIENT = OpenAI()
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": ANSWER_TOKENS,
}
TOOLS = [pydantic_function_tool(GetWeather)]


def parsed_call(**more: Any) -> object:
    call: Any = one(CLIENT.chat.completions.parse(**ASKED, tools=TOOLS, **more).choices[0].message.tool_calls)
    return same(type(call.function.parsed_arguments), GetWeather)


def parsed_answer() -> object:
    return same(type(CLIENT.chat.completions.parse(**ASKED, response_format=Sky).choices[0].message.parsed), Sky)


def answer_or_call() -> object:
    message = CLIENT.chat.completions.parse(**ASKED, response_format=Sky, tools=TOOLS).choices[0].message
    return same(message.parsed is not None or bool(message.tool_calls), True)


def streamed(**more: Any) -> object:
    with CLIENT.chat.completions.stream(**ASKED, **more) as stream:
        kinds = {event.type for event in stream}
        message: Any = stream.get_final_completion().choices[0].message
    same("content.done" in kinds or "tool_calls.function.arguments.done" in kinds, True)
    return message.parsed or [call.function.parsed_arguments for call in message.tool_calls]


run(
    bound={
        "parse, response_format": parsed_answer,
        "parse, tools required": lambda: parsed_call(tool_choice="required"),
        "parse, response_format and tools": answer_or_call,
        "stream, response_format": lambda: streamed(response_format=Sky),
        "stream, tools required": lambda: streamed(tools=TOOLS, tool_choice="required"),
    },
    free={"parse, tools": parsed_call},
)
