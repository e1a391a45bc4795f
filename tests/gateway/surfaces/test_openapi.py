"""Tests that /openapi.json describes what is served, and that /docs shows it from files in the package alone."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import api_tables
import pytest
from gateway_kit import MODEL, TestBench, open_bench

import headrace
from headrace.gateway.surfaces.dialect.field_table import CHAT, COMPLETIONS, TABLE
from headrace.gateway.surfaces.routes import ENDPOINTS
from headrace.text.folder import TextModel
from tools import vendor_web

pytestmark = pytest.mark.loop


async def document(bench: TestBench) -> dict[str, Any]:
    found: dict[str, Any] = (await bench.client.get("/openapi.json")).json()
    return found


async def test_every_endpoint_is_described(bench: TestBench) -> None:
    paths = (await document(bench))["paths"]
    described = {(path, method) for path, operations in paths.items() for method in operations}
    assert described == {(endpoint.shown_path, endpoint.method.lower()) for endpoint in ENDPOINTS}
    for endpoint in ENDPOINTS:
        operation = paths[endpoint.shown_path][endpoint.method.lower()]
        assert ("security" in operation) == (not endpoint.is_public)
        assert ("requestBody" in operation) == (endpoint.request is not None)
        given = [(row["name"], row["in"]) for row in operation.get("parameters", [])]
        assert given == [*((name, "path") for name in endpoint.path_params), *((row.name, "query") for row in endpoint.query)]


async def test_answers_are_of_the_media_type_that_is_described(bench: TestBench) -> None:
    """Of the paths that can be asked without a body or a name."""
    for endpoint in ENDPOINTS:
        if endpoint.method == "GET" and not endpoint.path_params:
            response = await bench.client.get(endpoint.path)
            assert response.headers["content-type"].startswith(endpoint.media_type), endpoint.path


@pytest.mark.pure
def test_documentation_is_this_table() -> None:
    assert api_tables.shown(api_tables.PATHS) == api_tables.paths_table(), "run python -m tests.support.api_tables"


async def test_references_lead_somewhere(bench: TestBench) -> None:
    text = (await bench.client.get("/openapi.json")).text
    schemas = json.loads(text)["components"]["schemas"]
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names <= set(schemas)
    assert {"ChatRequest", "CompletionRequest", "ChatCompletion", "ErrorBody", "TokenizeRequest"} <= names


async def test_request_schemas_are_the_field_table(bench: TestBench) -> None:
    schemas = (await document(bench))["components"]["schemas"]
    for surface, name in ((CHAT, "ChatRequest"), (COMPLETIONS, "CompletionRequest")):
        wanted = {rule.name for rule in TABLE if surface in rule.places}
        assert set(schemas[name]["properties"]) == wanted
        assert schemas[name]["additionalProperties"] is False


async def test_docs_page_loads_nothing_from_elsewhere(bench: TestBench) -> None:
    page = await bench.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert links
    for link in links:
        assert link.startswith("/docs/")
        assert (await bench.client.get(link)).status_code == 200


async def test_a_browser_opens_the_docs_of_a_server_with_keys_and_enters_one_there(bench: TestBench, text: TextModel) -> None:
    async with open_bench(text, api_keys=[{"key": "sk-0123456789"}]) as keyed:
        for path in ("/docs", "/docs/docs.js", "/docs/swagger-ui.css", "/openapi.json"):
            shown = await keyed.client.get(path, headers={"accept": "text/html"})
            assert (shown.status_code, shown.content) == (200, (await bench.client.get(path)).content), "the same on every server"
        made = await document(keyed)
        assert (await keyed.client.post("/docs")).status_code == 405
    assert MODEL not in str(made)
    assert headrace.__version__ not in str(made["info"]), "GET /version wants a key"
    chat = made["paths"]["/v1/chat/completions"]["post"]
    assert [made["components"]["securitySchemes"][name] for name in chat["security"][0]] == [{"type": "http", "scheme": "bearer"}]


@pytest.mark.parametrize("name", ["VENDORED.json", "swagger-ui.LICENSE", "nope.js", "..%2fapp.py", "%2e%2e/app.py", "docs.html/x"])
async def test_only_listed_files_are_served(bench: TestBench, name: str) -> None:
    assert (await bench.client.get(f"/docs/{name}")).status_code == 404


@pytest.mark.pure
def test_vendored_files_are_unchanged_and_licensed() -> None:
    assert vendor_web.check() == []
    static = files("headrace.gateway").joinpath("static")
    assert "Apache License" in static.joinpath("swagger-ui.LICENSE").read_text()
