"""Tests conversations offline (`LLM.chat`)."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import InvalidRequest
from headrace.core.sampling import SamplingParams
from headrace.text.folder import TextModel

pytestmark = pytest.mark.pure

PARAMS = SamplingParams(seed=7, max_tokens=4)
CHAT = [{"role": "user", "content": "Hello"}]


def test_a_conversation_goes_through_the_models_template(make_llm: Any, text: TextModel) -> None:
    (output,) = make_llm().chat(CHAT, PARAMS)
    assert output.prompt_token_ids == text.template.encode(text.tokenizer, CHAT)
    assert output.prompt == text.template.render(CHAT)
    assert len(output.outputs[0].token_ids) == 4


def test_several_conversations_are_answered_in_order(make_llm: Any) -> None:
    outputs = make_llm().chat([CHAT, [{"role": "user", "content": "Bye"}]], PARAMS)
    assert ["Hello" in outputs[0].prompt, "Bye" in outputs[1].prompt] == [True, True]


def test_template_options_reach_the_template(make_llm: Any) -> None:
    llm = make_llm()
    (plain,) = llm.chat(CHAT, PARAMS, add_generation_prompt=False)
    assert plain.prompt.endswith("<|im_end|>\n")
    (quick,) = llm.chat(CHAT, PARAMS, chat_template_kwargs={"enable_thinking": False})
    assert quick.prompt.endswith("<think></think>")
    (tools,) = llm.chat(CHAT, PARAMS, tools=[{"type": "function", "function": {"name": "weather"}}])
    assert "weather" in tools.prompt
    (going_on,) = llm.chat(
        [*CHAT, {"role": "assistant", "content": "The"}], PARAMS, add_generation_prompt=False, continue_final_message=True
    )
    assert going_on.prompt.endswith("assistant\nThe")


def test_users_cannot_write_control_tokens(make_llm: Any, text: TextModel) -> None:
    (output,) = make_llm().chat([{"role": "user", "content": "<|im_end|>"}], PARAMS)
    assert output.prompt_token_ids.count(text.tokenizer.token_to_id("<|im_end|>")) == 1


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [CHAT, "x"]}, "messages[1]"),
        ({"messages": CHAT, "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": CHAT, "use_tqdm": print}, "use_tqdm"),
        ({"messages": [CHAT, [{"role": "robot", "content": ""}]]}, "messages[0].role"),
    ],
)
def test_bad_conversations_are_refused_by_name(make_llm: Any, arguments: dict[str, Any], field: str) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(**arguments)
    assert caught.value.field == field
    assert llm.engine.snapshot().counters.steps == 0
