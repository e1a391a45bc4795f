"""Tests the lines of `headrace explain`."""

from __future__ import annotations

import pytest

from headrace.cli.chat.client import ApiClient
from headrace.cli.explain import BAR_CHARS, explain, lines_of
from headrace.gateway.generation.explanations import (
    ComparedReplica,
    ExplainedAttempt,
    ExplainedLimit,
    ExplainedMiss,
    ExplainedModel,
    ExplainedRoute,
    ExplainedStage,
    ExplainedTokens,
    Explanation,
)

pytestmark = pytest.mark.pure

STAGES = [ExplainedStage("admit", 0.0, 0.0005), ExplainedStage("queue", 0.001, 1.5), ExplainedStage("decode", 1.501, 0.498)]
COMPARED = [ComparedReplica("r0", 1, 0.25, predicted_s=0.4, cached_tokens=96), ComparedReplica("r1", 9, 0.99, lacks_blocks=True)]
LOST = ExplainedAttempt("r1", 0.001, 0.2, "the less busy", "lost", num_sequences=2, compared=COMPARED, policy="power-of-two")
SLOW = Explanation(
    request_id="0123456789abcdef01234567",
    wall_s=2.0,
    stages=STAGES,
    unattributed_s=0.0015,
    route=ExplainedRoute("r0", None, 1, [LOST]),
    time=1_800_000_000.0,
    path="/v1/chat/completions",
    kept_in="memory",
    outcome="completed",
    status=200,
    model="m",
    tenant="acme",
    finish_reasons=["stop"],
    ttft_s=1.6,
    tokens=ExplainedTokens(100, 64, 20, ExplainedMiss(64, "never_seen", "messages[3]")),
    limits=[ExplainedLimit("requests_per_minute", 3, 60)],
    cost=0.00012,
)


def test_a_person_reads_where_the_time_went() -> None:
    lines = list(lines_of(SLOW))
    assert lines[1] == "/v1/chat/completions, m: completed (200), finished by stop"
    assert lines[2] == "2.000 s, first token after 1.600 s, 100 tokens in (64 cached), 20 out, cost 0.00012"
    assert lines[3] == "not cached from token 64 on, in messages[3]: never seen"
    bars = {line.split()[0]: line.split("|")[1] for line in lines if "|" in line}
    assert list(bars) == ["admit", "queue", "decode"]
    assert {len(bar) for bar in bars.values()} == {BAR_CHARS}
    assert [bar.count("#") for bar in bars.values()] == [1, 30, 10]
    assert lines[-6:] == [
        "",
        "replica   r1 by power-of-two, the less busy: lost after 200.00 ms, 2 sequences",
        "          - r0: 1 requests, KV 25% in use, 96 tokens cached, done in 400.00 ms",
        "          - r1: 9 requests, KV 99% in use, too few KV blocks free",
        "limits    requests_per_minute 3 of 60",
        "kept in   the memory of the gateway process that answered, alone",
    ]


def test_a_refused_request_names_what_refused_it() -> None:
    told = Explanation(
        request_id="0" * 24,
        wall_s=0.0,
        stages=[],
        unattributed_s=0.0,
        route=ExplainedRoute(models=[ExplainedModel("big", "It is busy."), ExplainedModel("small", "It can answer.", is_chosen=True)]),
        time=0.0,
        path="/v1/completions",
        kept_in="memory",
        outcome="refused",
        status=429,
        error="rate_limit_exceeded",
        limit="requests_per_minute",
    )
    lines = list(lines_of(told))
    assert lines[1] == "/v1/completions, no model: refused (429), rate_limit_exceeded, limit requests_per_minute"
    assert lines[-4:-1] == [
        "model     big, passed over: It is busy.",
        "model     small: It can answer.",
        "route     it was sent to no replica",
    ]


def test_the_id_of_an_event_is_that_of_its_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    paths: list[str] = []

    def get(_client: ApiClient, path: str) -> dict[str, object]:
        paths.append(path)
        return {}

    monkeypatch.setattr(ApiClient, "get", get)
    explain(f"{'0' * 24}/12", as_json=True)
    assert paths == [f"/v1/requests/{'0' * 24}/explain"]
    assert capsys.readouterr().out == "{}\n"
