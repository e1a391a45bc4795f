"""Tests which requests have a usage record, and what it has of them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from api_tables import COLUMN_ROWS, USAGE_PAGE, columns_table, shown
from finished import finished

from headrace.gateway.ledger.record import COLUMNS, UsageRecord, decode_record, encode_record, is_recorded, usage_record
from headrace.observe.finished_request import Charged, FinishedRequest, Outcome
from headrace.observe.request_log import line_of, text_of

pytestmark = pytest.mark.pure

CHARGED = Charged(prompt_tokens=10, completion_tokens=5, cached_tokens=4, cost_nanos=18_000)


def ended(**changes: Any) -> FinishedRequest:
    """A completed request: 10 prompt tokens, 4 of them cached, and 5 generated ones, all of which were charged."""
    plain: dict[str, Any] = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5, "outcome": Outcome.COMPLETED, "model": "fox"}
    return finished(**({"time": 1.5, "tenant": "acme", "charged": CHARGED} | plain | changes))


def test_what_was_charged_is_recorded_and_not_what_the_answer_has() -> None:
    answered = {"prompt_tokens": 20, "cached_tokens": 19, "completion_tokens": 18, "estimated_tokens": 17}
    for charged in (CHARGED, CHARGED._replace(estimated_tokens=3), Charged()):
        assert {name: getattr(usage_record(ended(**answered, charged=charged)), name) for name in Charged._fields} == charged._asdict()


@pytest.mark.parametrize(
    ("changes", "is_one"),
    [
        ({}, True),
        ({"completion_tokens": None, "charged": Charged()}, False),
        ({"completion_tokens": None, "charged": Charged(), "cache_tier": "response"}, True),
        ({"outcome": Outcome.REFUSED, "completion_tokens": 0, "charged": Charged()}, False),
        ({"outcome": Outcome.REFUSED, "completion_tokens": 0, "charged": Charged(prompt_tokens=10)}, True),
        ({"outcome": Outcome.FAILED, "completion_tokens": 0, "charged": Charged()}, True),
    ],
)
def test_what_reached_an_engine_or_a_cache_is_recorded(changes: dict[str, Any], is_one: bool) -> None:
    assert is_recorded(ended(**changes)) is is_one


def test_the_cache_that_answered_is_named() -> None:
    tiers = [usage_record(ended(**changes)).cache_tier for changes in ({}, {"charged": Charged()})]
    assert tiers == ["prefix", ""]
    assert usage_record(ended(cache_tier="response")).cache_tier == "response"


def test_an_adapter_is_named_beside_its_base_model() -> None:
    request = ended(model="fox", adapter="sql")
    record, line = usage_record(request), json.loads(line_of(request))
    assert (record.model, record.adapter_id) == (line["model"], line["adapter"]) == ("fox", "sql")
    assert text_of(request, is_short=True).count("sql") == 1
    assert (usage_record(ended()).adapter_id, "adapter" in json.loads(line_of(ended()))) == ("", False)


def test_the_name_that_the_client_sent_stands_beside_the_model_that_answered() -> None:
    request = ended(model="small-1", requested_model="assistant:small")
    request = request._replace(answered=request.answered._replace(model="small-2"))
    record, line = usage_record(request), json.loads(line_of(request))
    assert (record.model, record.requested_model) == (line["model"], line["requested_model"]) == ("small-2", "assistant:small")


def test_json_has_what_is_known_and_reads_back() -> None:
    record = usage_record(ended(ttft_s=0.0125, finish_reasons=("stop", "length", "stop"), user="ann"))
    assert (record.time_ms, record.ttft_ms, record.finish_reason) == (1500, 12.5, "stop,length")
    assert decode_record(encode_record(record)) == record
    assert b"tpot_ms" not in encode_record(record)


def test_the_page_has_the_columns_of_the_record() -> None:
    assert shown(COLUMN_ROWS, USAGE_PAGE) == columns_table(), "make derived"
    assert tuple(column.name for column in COLUMNS) == UsageRecord.__struct_fields__


def test_a_table_that_is_there_can_gain_every_column_that_a_record_may_lack() -> None:
    """A null in an earlier row stands for a field that may be None alone."""
    for column, kept in zip(COLUMNS, msgspec.structs.fields(UsageRecord), strict=True):
        assert ("DEFAULT" in column.kind.sqlite) == ("Nullable" not in column.kind.clickhouse) == (kept.default is not None)
