"""Paths and their endpoints: exact ones, ones with names in them, and what of them the request log shows."""

from __future__ import annotations

import re

import pytest

from headrace.gateway.http.errors import MethodNotAllowed
from headrace.gateway.paths import MAX_LOGGED_PATH, find_path, logged_path
from headrace.gateway.surfaces.endpoint import Endpoint
from headrace.gateway.surfaces.routes import ENDPOINTS, Handler

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("row", ENDPOINTS, ids=lambda row: f"{row.method} {row.path}")
def test_every_row_of_the_table_is_found(row: Endpoint[Handler]) -> None:
    found, values = find_path(re.sub(r"{\w+(:path)?}", "name", row.path))
    assert found is not None
    assert found.endpoint(row.method) is row
    assert list(values) == row.path_params


@pytest.mark.parametrize(
    ("path", "shown", "values"),
    [
        ("/v1/models/org/name", "/v1/models/{model}", {"model": "org/name"}),
        ("/v1/models/", "/v1/models/{model}", {"model": ""}),
        ("/v1/sessions/a b", "/v1/sessions/{id}", {"id": "a b"}),
    ],
)
def test_a_name_in_a_path_is_read(path: str, shown: str, values: dict[str, str]) -> None:
    found, read = find_path(path)
    assert found is not None
    assert (found.shown_path, read) == (shown, values)
    assert logged_path(path) == shown


@pytest.mark.parametrize(
    "path", ["", "/v1", "/v1/models/a\n", "/v1/sessions/a/b", "/v1/sessions/", "/live/", "//live", "/v1/chat/completions/x"]
)
def test_other_paths_are_unknown(path: str) -> None:
    assert find_path(path) == (None, {})


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
