"""Tests paths and their endpoints: exact ones, ones with names in them, and what of them the request log shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gateway_kit import chat_body, open_bench

from headrace.gateway.http.errors import MethodNotAllowed
from headrace.gateway.surfaces.endpoint import Endpoint
from headrace.gateway.surfaces.routes import ENDPOINTS, MAX_LOGGED_PATH, AnsweredPath, find_path, logged_path, plain_path
from headrace.gateway.text_host import parsers_of
from headrace.text.folder import TextModel

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("row", ENDPOINTS, ids=lambda row: f"{row.method} {row.path}")
def test_every_row_of_the_table_is_found(row: Endpoint) -> None:
    found, values = find_path(re.sub(r"{\w+(:path)?}", "name", row.path))
    assert found is not None
    assert found.endpoint(row.method) is row
    assert list(values) == row.path_params


@pytest.mark.parametrize(
    ("path", "shown", "values"),
    [
        ("/v1/models/org/name", "/v1/models/{model}", {"model": "org/name"}),
        ("/v1/sessions/a b", "/v1/sessions/{id}", {"id": "a b"}),
    ],
)
def test_a_name_in_a_path_is_read(path: str, shown: str, values: dict[str, str]) -> None:
    found, read = find_path(path)
    assert found is not None
    assert (found.shown_path, read) == (shown, values)
    assert logged_path(path) == shown


@pytest.mark.parametrize(
    "path",
    ["", "/v1", "/v1/models/", "/v1/models/a\n", "/v1/sessions/a/b", "/v1/sessions/", "/live/", "//live", "/v1/chat/completions/x"],
)
def test_other_paths_are_unknown(path: str) -> None:
    assert find_path(path) == (None, {})


@pytest.mark.parametrize("row", ENDPOINTS, ids=lambda row: f"{row.method} {row.path}")
def test_slashes_too_many_change_no_route(row: Endpoint) -> None:
    path = re.sub(r"{\w+(:path)?}", "name", row.path)
    for sent in (path, f"/{path}", f"{path}/", f"{path}//", path.replace("/", "//"), f"//{path}///"):
        plain = plain_path(sent)
        found, values = find_path(plain)
        assert found is not None
        assert found.endpoint(row.method) is row
        assert (list(values), logged_path(plain)) == (row.path_params, row.shown_path)


def test_dots_and_other_letters_stay_what_they_are() -> None:
    assert plain_path("/health/../v1//models/./") == "/health/../v1/models/."
    assert plain_path("/HEALTH/ ") == "/HEALTH/ "
    assert [plain_path(path) for path in ("", "/", "//", "/" * 100_000)] == ["/"] * 4


@pytest.mark.loop
@pytest.mark.parametrize("path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions//"])
async def test_a_body_posted_to_slashes_too_many_is_the_same_request(text: TextModel, tmp_path: Path, path: str) -> None:
    """No redirect, in which it would be lost; and one request for limits, answers that are kept, metrics and the log."""
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log), limits={"max_requests": 1}) as bench:
        for sent in ("/v1/chat/completions", path):
            answer = await bench.client.post(f"http://localhost{sent}", json=chat_body(seed=1), headers={"idempotency-key": "one"})
            assert answer.status_code == 200
        assert answer.headers["idempotent-replayed"] == "true"
        assert (await bench.client.get(f"http://localhost{path}")).headers["allow"] == "POST"
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["path"], line["status"]) for line in logged] == [("/v1/chat/completions", status) for status in (200, 200, 405)]


def test_an_unknown_path_is_logged_without_a_sessions_name_and_cut() -> None:
    assert logged_path("/v1/sessions/secret/more") == "/v1/sessions/{id}"
    assert logged_path("/" + "x" * 999) == "/" + "x" * (MAX_LOGGED_PATH - 1)


def test_a_method_that_a_path_does_not_have_names_those_that_it_has() -> None:
    found, _ = find_path("/v1/sessions/a")
    assert found is not None
    assert found.endpoint("HEAD") is found.endpoint("GET")
    with pytest.raises(MethodNotAllowed) as refused:
        found.endpoint("POST")
    assert refused.value.allowed == ("DELETE", "GET", "HEAD")


def test_a_text_worker_knows_the_parser_of_every_path_that_reads_a_body() -> None:
    assert {row.path for row in ENDPOINTS if row.method == "POST"} == set(parsers_of(ENDPOINTS))


def test_readers_may_ask_for_these_paths_alone() -> None:
    """A new path refuses readers until its row says otherwise."""
    rows = [row for row in ENDPOINTS if row.for_readers]
    assert {row.path for row in rows} == {
        "/v1/models",
        "/v1/models/{model:path}",
        "/v1/usage",
        "/v1/requests/{id}/explain",
        "/metrics",
        "/version",
        "/load",
    }
    assert {(row.method, row.generates, row.is_public) for row in rows} == {("GET", False, False)}


def test_two_rows_of_one_path_and_method_are_refused() -> None:
    """Neither replaces the other silently, in the router or in a text worker."""
    row = next(row for row in ENDPOINTS if row.path == "/v1/tokenize")
    answered = AnsweredPath(row.path, row.path)
    answered.add(row)
    with pytest.raises(AssertionError, match="two rows answer POST /v1/tokenize"):
        answered.add(row)
    with pytest.raises(AssertionError, match="two rows read bodies of /v1/tokenize"):
        parsers_of((*ENDPOINTS, row))
