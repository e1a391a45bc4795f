"""Tests pages of other origins in a real browser: Chromium, headless, against `headrace serve --allowed-origins`.

A page is served by this process on a port of its own, which makes it a page of another origin. It asks the server what an application
would (a list of models with a key, a stream, a request that is refused) and reports what the browser let it read.
"""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_kit import KEY, Server, serving

CHROMIUM = shutil.which("chromium")
PAGE_S = 120.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking")
"""No sandbox: the tests may run as root, and the only page that is opened is the one below."""

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: run `make browser`"),
]

PAGE = """<!doctype html><meta charset="utf-8"><title>A page of another origin</title><script>
const base = %(base)s, key = {"authorization": "Bearer %(key)s"};
const body = {model: "random", messages: [{role: "user", content: "Hello"}], max_tokens: 8, ignore_eos: true};
async function asked(path, options) {
  try {
    const answer = await fetch(base + path, options);
    const headers = Object.fromEntries(["x-request-id", "x-headrace-ignored"].map(name => [name, answer.headers.get(name)]));
    return {status: answer.status, text: await answer.text(), headers};
  } catch (error) {
    return {refused: error.name};
  }
}
function chat(more) {
  return {method: "POST", headers: {...key, "content-type": "application/json"}, body: JSON.stringify({...body, ...more})};
}
(async () => {
  const found = {
    origin: location.origin,
    health: await asked("/health", {}),
    models: await asked("/v1/models", {headers: key}),
    keyless: await asked("/v1/models", {}),
    stream: await asked("/v1/chat/completions", chat({stream: true, user: "page"})),
    invalid: await asked("/v1/chat/completions", chat({temperature: 9})),
  };
  await fetch("/report", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), PageHandler)
        self.page = b""
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()

    def origin(self, host: str) -> str:
        return f"http://{host}:{self.server_port}"


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/" else 404, self.server.page if self.path == "/" else b"")

    def do_POST(self) -> None:
        self.server.reports.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer(204, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def pages() -> Iterator[PageServer]:
    with PageServer() as pages:
        thread = threading.Thread(target=pages.serve_forever)
        thread.start()
        yield pages
        pages.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def api(pages: PageServer, random_folder: Path) -> Iterator[Server]:
    """`headrace serve` with a key, which lists the page's origin under the name 127.0.0.1 and no other."""
    config = {
        "models": [{"name": "random", "engine": {"model": str(random_folder), "dtype": "float32", "num_threads": 1}}],
        "gateway": {"api_keys": [{"key": KEY}], "request_log": "{folder}/requests.jsonl"},
    }
    with serving(config, "--allowed-origins", pages.origin("127.0.0.1")) as api:
        pages.page = (PAGE % {"base": json.dumps(f"http://127.0.0.1:{api.port}"), "key": KEY}).encode()
        yield api


def reported(pages: PageServer, host: str, profile: Path) -> dict[str, Any]:
    """What the page reports once Chromium has opened it under `host`. Raises queue.Empty where nothing came within PAGE_S."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", pages.origin(host)]
    with open(profile / "log", "wb") as log:
        browser = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        return pages.reports.get(timeout=PAGE_S)
    finally:
        browser.terminate()
        browser.wait(30)


def logged(api: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (api.folder / "requests.jsonl").read_text().splitlines()]


def test_a_listed_page_reads_answers_streams_and_errors(api: Server, pages: PageServer, tmp_path: Path) -> None:
    found = reported(pages, "127.0.0.1", tmp_path)
    assert found["origin"] == pages.origin("127.0.0.1")
    assert found["health"]["status"] == 200
    assert json.loads(found["models"]["text"])["data"][0]["id"] == "random"
    assert found["keyless"]["status"] == 401
    assert found["stream"]["status"] == 200
    assert found["stream"]["text"].endswith("data: [DONE]\n\n")
    assert found["stream"]["headers"]["x-headrace-ignored"] == "user"
    assert len(found["stream"]["headers"]["x-request-id"]) == 24
    assert found["invalid"]["status"] == 400
    assert json.loads(found["invalid"]["text"])["error"]["param"] == "temperature"
    preflights = [line for line in logged(api) if line["method"] == "OPTIONS"]
    assert preflights
    assert {(line["status"], line["path"]) for line in preflights} == {(204, "/v1/models"), (204, "/v1/chat/completions")}


def test_a_page_that_is_not_listed_reads_nothing_and_its_posts_never_come(api: Server, pages: PageServer, tmp_path: Path) -> None:
    num_before = len(logged(api))
    found = reported(pages, "localhost", tmp_path)
    assert found.pop("origin") == pages.origin("localhost")
    assert set(found) == {"health", "models", "keyless", "stream", "invalid"}
    assert all(answer == {"refused": "TypeError"} for answer in found.values()), found
    api.until(lambda: len(logged(api)) >= num_before + 5)
    lines = logged(api)[num_before:]
    assert {(line["status"], line["error"]) for line in lines} == {(403, "forbidden")}
    assert not [line for line in lines if line["method"] == "POST"]
