"""Renders the chat form of the tiny models: ChatML turns, tools and calls in Hermes form.

`CHAT_TEMPLATE` is the truth and is shipped; `render` writes the same text a few hundred times faster for the corpus.
tests/tools/test_training_texts.py holds the two together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

END_OF_TEXT, IM_START, IM_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END, PAD)
MARKER_TOKENS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOLS_HEADER = "You may call these functions:"

CHAT_TEMPLATE = """\
{%- set first = 0 -%}
{%- if messages and messages[0].role == 'system' -%}{%- set first = 1 -%}{%- endif -%}
{%- if tools or first -%}
{{- '<|im_start|>system\\n' -}}
{%- if first -%}{{- messages[0].content -}}{%- endif -%}
{%- if tools -%}
{%- if first -%}{{- '\\n\\n' -}}{%- endif -%}
{{- 'You may call these functions:\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}
{{- '</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[first:] -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'tool' -%}
{{- '<tool_response>\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}{{- message.content | tojson -}}{%- endif -%}
{{- '\\n</tool_response>' -}}
{%- else -%}
{%- if message.content -%}{{- message.content -}}{%- endif -%}
{%- if message.tool_calls -%}
{%- for tool_call in message.tool_calls -%}
{%- set call = tool_call.function if tool_call.function else tool_call -%}
{%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{%- if call.arguments is string -%}{{- call.arguments -}}{%- else -%}{{- call.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def tool_result(value: object) -> Message:
    return {"role": "tool", "content": json.dumps(value, ensure_ascii=False)}


def tool_calls(calls: Sequence[tuple[str, dict[str, object]]]) -> Message:
    """An assistant turn that calls functions, in the shape of the OpenAI API."""
    functions = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": "", "tool_calls": functions}


def content_text(message: Message) -> str:
    """What stands between the role line and `<|im_end|>`."""
    if message["role"] == "tool":
        return f"<tool_response>\n{message['content']}\n</tool_response>"
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def render(messages: Sequence[Message], tools: Sequence[Tool] = (), *, add_generation_prompt: bool = False) -> str:
    """The text that `CHAT_TEMPLATE` makes of the same arguments."""
    rest, head = list(messages), []
    if rest and rest[0]["role"] == "system":
        head.append(rest.pop(0)["content"])
    if tools:
        lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        head.append(f"{TOOLS_HEADER}\n<tools>\n{lines}</tools>")
    text = f"{IM_START}system\n" + "\n\n".join(head) + f"{IM_END}\n" if head else ""
    text += "".join(f"{IM_START}{message['role']}\n{content_text(message)}{IM_END}\n" for message in rest)
    return text + (f"{IM_START}assistant\n" if add_generation_prompt else "")
