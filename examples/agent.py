"""A model calls local Python functions through the OpenAI SDK.

    headrace serve &
    python examples/agent.py "What is the weather in Rome?"

The functions are those of examples/weather.py. `headrace.functions` makes the schemas from their type hints and makes the calls; the rest
is the loop that every client of tools has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

from headrace.functions import functions_in

FUNCTIONS = functions_in(Path(__file__).with_name("weather.py"))
MAX_ROUNDS = 5


def answer(client: OpenAI, question: str) -> str:
    """The model's answer in text, after the calls it made on the way."""
    model = client.models.list().data[0].id
    tools: Any = [function.tool.requested() for function in FUNCTIONS.values()]
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_ROUNDS):
        said = client.chat.completions.create(model=model, messages=messages, tools=tools, temperature=0).choices[0].message
        if not said.tool_calls:
            return said.content or ""
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            assert call.type == "function"
            function = FUNCTIONS.get(call.function.name)
            result = function.answer(call.function.arguments) if function else f"error: there is no function {call.function.name}"
            print(f"{call.function.name}({call.function.arguments}) -> {result}", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return f"(no answer after {MAX_ROUNDS} rounds of calls)"


if __name__ == "__main__":
    url, key = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), os.environ.get("OPENAI_API_KEY", "none")
    print(answer(OpenAI(base_url=url, api_key=key), " ".join(sys.argv[1:]) or "What is the weather in Paris?"))
