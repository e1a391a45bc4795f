"""Log-probabilities as JSON: what the model rules out still has a number."""

from __future__ import annotations

import json
import math

import msgspec

from headrace.gateway.logprobs import LOWEST_LOGPROB, chat_logprobs, completion_logprobs
from headrace.text.assemble import TokenEntry, TopToken


def test_a_token_the_model_rules_out_gets_the_lowest_number_not_null() -> None:
    top = TopToken(2, "b", b"b", -math.inf)
    entry = TokenEntry(1, "a", b"a", -math.inf, 1, (top,), 0)
    chat = json.loads(msgspec.json.encode(chat_logprobs([entry], 1)))
    assert chat["content"][0]["logprob"] == chat["content"][0]["top_logprobs"][0]["logprob"] == LOWEST_LOGPROB
    completion = json.loads(msgspec.json.encode(completion_logprobs([entry], 1)))
    assert completion["token_logprobs"] == [LOWEST_LOGPROB]
    assert completion["top_logprobs"] == [{"a": LOWEST_LOGPROB, "b": LOWEST_LOGPROB}]
