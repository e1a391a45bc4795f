"""Tries instructor: its modes for the chat API."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import instructor
from cases import ANSWER_TOKENS, MODEL, Case, run
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city and its country. Values are bounded, so that a small model comes to an end."""

    name: Literal["Paris", "Rome", "Oslo"]
    country: Literal["France", "Italy", "Norway"]


def typed(mode: Any, kind: Any = City) -> Any:
    client = instructor.from_openai(OpenAI(), mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        response_model=kind,
        max_retries=0,
        temperature=0,
        max_tokens=ANSWER_TOKENS,
    )


def cases(*names: str) -> dict[str, Case]:
    return {name: partial(typed, instructor.Mode[name]) for name in names}


def several() -> object:
    return list(typed(instructor.Mode.PARALLEL_TOOLS, Iterable[City]))


run(bound=cases("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"), free={**cases("JSON", "MD_JSON"), "PARALLEL_TOOLS": several})
