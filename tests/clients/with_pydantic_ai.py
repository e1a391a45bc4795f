"""Tries pydantic-ai: text, tools, and its three ways to typed output."""

from __future__ import annotations

from typing import Literal

from cases import ANSWER_TOKENS, MODEL, QUESTION, run, same
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.settings import ModelSettings, ToolOrOutput

SETTINGS = ModelSettings(temperature=0, max_tokens=ANSWER_TOKENS)
ASKED = "What is the capital of France?"


class City(BaseModel):
    """A city and its country. Values are bounded, so that a small model comes to an end."""

    name: Literal["Paris", "Rome", "Oslo"]
    country: Literal["France", "Italy", "Norway"]


def get_weather(city: str) -> str:
    """The weather in a city."""
    CALLED.append(city)
    return f"rain in {city}"


CALLED: list[str] = []


def typed(output: object) -> object:
    agent = Agent(OpenAIChatModel(MODEL), output_type=output, model_settings=SETTINGS)
    return agent.run_sync(ASKED).output


def streamed() -> object:
    with_text = Agent(OpenAIChatModel(MODEL), model_settings=SETTINGS)
    pieces = list(with_text.run_stream_sync("Hello!").stream_text(delta=True))
    return same("".join(pieces), with_text.run_sync("Hello!").output)


def tool() -> object:
    answer = Agent(OpenAIChatModel(MODEL), tools=[get_weather], model_settings=SETTINGS).run_sync(QUESTION).output
    if not CALLED:
        raise AssertionError("the model called nothing")
    return answer


def some_tools() -> object:
    """Both functions are shown to the model; `tool_choice` allows one of them."""

    def get_time(city: str) -> str:
        """The time in a city."""
        return f"noon in {city}"

    CALLED.clear()
    settings = ModelSettings(temperature=0, max_tokens=ANSWER_TOKENS, tool_choice=ToolOrOutput(["get_time"]))
    answer = Agent(OpenAIChatModel(MODEL), tools=[get_weather, get_time], model_settings=settings).run_sync(QUESTION).output
    same(CALLED, [])
    return answer


run(
    bound={
        "text": lambda: Agent(OpenAIChatModel(MODEL), model_settings=SETTINGS).run_sync("Hello!").output,
        "text, streamed": streamed,
        "ToolOutput": lambda: typed(ToolOutput(City)),
        "NativeOutput": lambda: typed(NativeOutput(City)),
        "tool_choice ToolOrOutput": some_tools,
    },
    free={"tools": tool, "PromptedOutput": lambda: typed(PromptedOutput(City))},
)
