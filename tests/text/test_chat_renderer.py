"""Tests that chat templates are rendered as transformers renders them, and cannot leave their sandbox."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from headrace.bundled import DEFAULT_MODEL, bundled_path
from headrace.text.chat_renderer import render
from headrace.text.folder import load_text

pytestmark = pytest.mark.pure

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Weather in Paris?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning": "They want the weather.",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris", "days": 2, "exact": None}}}],
    },
    {"role": "tool", "content": "12 \u00b0C \u2603"},
    {"role": "assistant", "content": "It is  "},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}}]

LOOP = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TEMPLATES = {
    "a loop": LOOP,
    "white space": "  {% if true %}\n  a\n  {% endif %}\n{%- for m in messages -%} {{ m.role }} {% endfor %}\n\n",
    "loop controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "previous and next": "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}>{{ loop.index0 }}{% endfor %}",
    "JSON": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages[3].content | tojson(ensure_ascii=true) }}",
    "sorted JSON": "{{ tools[0] | tojson(sort_keys=true, separators=(',', ':')) }}{{ messages[2].tool_calls | tojson }}",
    "a namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "a namespace of a mapping": "{% set ns = namespace({'a': 1}, self=2) %}{{ ns.a }}{{ ns['self'] }}",
    "dicts": "{{ dict(a=1, b=[2]) }}{{ dict.fromkeys(['x', 'y'], 0) }}{{ dict([('k', 'v')]) }}",
    "macros": "{% macro show(m) %}[{{ m.role | upper }}]{{ caller() }}{% endmacro %}{% call show(messages[0]) %}x{% endcall %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{{ x }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}\n{% endfor %}",
    "keys": "{% for key, value in messages[2].items() %}{{ key }}={{ value }};{% endfor %}",
    "switches": "{{ add_generation_prompt }}{{ enable_thinking }}{{ bos_token }}{{ documents }}{{ missing }}",
    "filters": "{{ messages | map(attribute='role') | join(',') }}{{ messages[1].content | trim | length }}{{ 3 | string }}",
    "refusal": "{{ raise_exception('no <such> thing') }}",
    "an unknown function": "{{ missing.name.deeper }}",
    "a change of the conversation": "{{ messages.append(1) }}",
    "a change of a message": "{{ messages[0].update({'role': 'x'}) }}",
    "internals of a string": "{{ ''.__class__.__mro__ }}",
    "internals of a function": "{{ raise_exception.__globals__ }}",
    "internals of a dict": "{{ dict.__class__ }}",
    "internals through a filter": "{{ ''|attr('__class__') }}",
    "internals of a namespace": "{% set ns = namespace(__class__=1) %}",
    "internals set in a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "formatting of internals": "{{ '{0.__class__}'.format(messages) }}",
    "what is not JSON": "{{ cycler | tojson }}",
    "a syntax error": "{% for m in messages %}",
    "an unknown tag": "{% include_all %}",
}
VARIABLES: dict[str, Any] = {"tools": TOOLS, "documents": None, "add_generation_prompt": True, "enable_thinking": False, "bos_token": "<s>"}


def theirs(source: str, chat: list[dict[str, Any]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([chat], chat_template=source, **variables)
    return str(rendered[0])


def outcome(function: Any, *args: Any, **variables: Any) -> tuple[str, str]:
    """("", text), or the kind of the error and what a client is shown of it."""
    try:
        return "", function(*args, **variables)
    except SecurityError:
        return "SecurityError", ""
    except TemplateError as error:
        return type(error).__name__, str(error)
    except Exception as error:
        return type(error).__name__, ""


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_it_writes_in_transformers(name: str) -> None:
    source = TEMPLATES[name]
    assert outcome(render, source, CHAT, **VARIABLES) == outcome(theirs, source, CHAT, **VARIABLES)


@given(
    contents=st.lists(st.text(max_size=20), min_size=1, max_size=4),
    thinking=st.one_of(st.none(), st.text(max_size=5)),
    generation=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_the_bundled_template_writes_what_it_writes_in_transformers(contents: list[str], thinking: str | None, generation: bool) -> None:
    folder = bundled_path(DEFAULT_MODEL)
    assert folder is not None
    (source,) = load_text(folder).template.sources
    chat = [{"role": ("user", "assistant")[number % 2], "content": text, "thinking": thinking} for number, text in enumerate(contents)]
    for tools in (None, TOOLS):
        variables = {"tools": tools, "add_generation_prompt": generation}
        assert outcome(render, source, chat, **variables) == outcome(theirs, source, chat, **variables)


@pytest.mark.parametrize("content", ["It is", "It is  ", " It is", "a\n", "CONTINUE_FINAL_MESSAGE_TAG", "It is: It is"])
@pytest.mark.parametrize("source", [LOOP, LOOP.replace("message.content", "message.content | trim"), "{{ messages[-1].content }}<|end|>"])
def test_a_final_message_is_continued_where_transformers_continues_it(source: str, content: str) -> None:
    chat = [*CHAT, {"role": "assistant", "content": content}]
    ours = render(source, chat, continue_final_message=True)
    assert ours == theirs(source, chat, continue_final_message=True)
    assert ours.endswith(content.rstrip() if "trim" in source else content)


def test_a_template_that_leaves_out_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(TemplateError, match="cannot be continued"):
        render("{{ messages[0].content }}", CHAT, continue_final_message=True)


def test_the_sandbox_is_closed_and_a_broken_template_is_named() -> None:
    """What the comparisons above would not show if both sides let it through."""
    for name in ("internals of a namespace", "internals set in a namespace", "a change of the conversation", "a change of a message"):
        with pytest.raises(SecurityError):
            render(TEMPLATES[name], CHAT)
    assert render("{{ ''|attr('__class__') }}{{ raise_exception.__globals__ }}{{ dict.__class__ }}x", CHAT) == "x"
    with pytest.raises(SecurityError):
        render(TEMPLATES["internals of a string"], CHAT)
    with pytest.raises(TemplateSyntaxError):
        render(TEMPLATES["a syntax error"], CHAT)


def test_a_template_sees_json_values_alone_and_changes_nothing_of_the_callers() -> None:
    class Text(str):
        def write(self) -> str:
            raise AssertionError("a template has called it")

    chat = [{"role": "user", "content": Text("a")}]
    assert render("{{ messages[0].content }}{{ messages[0].content.write }}", chat) == "a"
    with pytest.raises(TypeError, match="set is not a JSON value"):
        render("", [{"role": "user", "content": {1}}])
    render(LOOP, chat, continue_final_message=True)
    assert chat == [{"role": "user", "content": "a"}]


@pytest.mark.process
def test_rendering_does_not_import_transformers() -> None:
    code = (
        "import sys, headrace.text.chat_renderer as r; r.render('x', []); print([n for n in ('transformers', 'numpy') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
