"""Compressed bodies: the same request as the plain one, within the same bound, whatever they are said to hold."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable

import httpx2
import msgspec
import pytest
from gateway_kit import TestBench, chat_body, dial, open_bench, post, serving
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest
from headrace.gateway.http.content_encoding import SLICE_BYTES, Inflater, decoder_of
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}
BODY = msgspec.json.encode(chat_body(seed=1))


async def send(bench: TestBench, body: bytes, *encodings: str) -> httpx2.Response:
    headers = [("content-type", "application/json"), *(("content-encoding", name) for name in encodings)]
    return await bench.client.post("/v1/chat/completions", content=body, headers=headers)


@pytest.mark.parametrize("encoding", PACK)
async def test_a_compressed_body_is_the_same_request(bench: TestBench, encoding: str) -> None:
    assert (await send(bench, BODY)).status_code == 200
    assert (await send(bench, PACK[encoding](BODY), encoding)).status_code == 200
    plain, packed = bench.replica.requests
    assert (packed.prompt_ids, packed.params, packed.salt) == (plain.prompt_ids, plain.params, plain.salt)


@pytest.mark.parametrize("encodings", [("br",), ("zstd",), ("gzip, gzip",), ("gzip", "gzip"), ("gzip", "identity"), ("nonsense",)])
async def test_another_encoding_is_refused_with_what_is_taken(bench: TestBench, encodings: tuple[str, ...]) -> None:
    response = await send(bench, gzip.compress(BODY), *encodings)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "gzip, deflate or identity" in response.json()["error"]["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate"


async def test_identity_is_no_encoding(bench: TestBench) -> None:
    assert (await send(bench, BODY, "identity")).status_code == 200


PACKED = gzip.compress(BODY)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (BODY, "damaged"),
        (PACKED[:-1], "ends before"),
        (b"", "ends before"),
        (PACKED[:20] + b"\xff" + PACKED[21:], "damaged"),
        (PACKED + b"x", "follow its end"),
        (PACKED + PACKED, "follow its end"),
        (zlib.compress(BODY), "damaged"),
    ],
    ids=["plain", "cut", "empty", "damaged", "trailing", "two members", "deflate"],
)
async def test_damaged_gzip_is_refused(bench: TestBench, body: bytes, said: str) -> None:
    response = await send(bench, body, "gzip")
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "body", "invalid_value")
    assert said in error["message"]


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """256 MiB in a quarter of one: a thousand to one."""
    return gzip.compress(bytes(256 << 20))


async def test_a_bomb_is_refused_before_it_goes_off(text: TextModel, bomb: bytes) -> None:
    """Inflated at once it would take 256 MiB; the cap here is 1 MiB, and what is made beyond it is one slice."""
    assert len(bomb) < 270_000
    async with open_bench(text) as bench:
        await bench.chat(max_tokens=1)
        tracemalloc.start()
        response = await send(bench, bomb, "gzip")
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert peak_bytes < (1 << 20) + 3 * len(bomb) + 4 * SLICE_BYTES
        assert bench.gateway.service.memory.held == 0


async def test_a_bomb_is_refused_over_a_socket_and_the_server_goes_on(bench: TestBench, bomb: bytes) -> None:
    async with serving(bench.gateway) as port:
        async with dial(port) as (reader, writer):
            lines = ["POST /v1/chat/completions HTTP/1.1", "host: localhost", "content-type: application/json"]
            lines += [f"content-length: {len(bomb)}", "content-encoding: gzip", "", ""]
            writer.write("\r\n".join(lines).encode() + bomb)
            assert b" 413 " in await reader.readline()
        async with dial(port) as (reader, writer):
            writer.write(post("/v1/chat/completions", chat_body(max_tokens=1)))
            assert b" 200 " in await reader.readline()


async def test_a_stream_that_gives_nothing_is_bounded_too(text: TextModel) -> None:
    """Empty blocks inflate to no byte at all, however many are sent."""
    head, empty_block = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff", b"\x00\x00\x00\xff\xff"
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        yield head
        while True:
            sent += 1
            yield empty_block * 200

    async with open_bench(text, limits={"max_body_bytes": 65_536}) as bench:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        response = await bench.client.post("/v1/chat/completions", content=chunks(), headers=headers)
        assert response.status_code == 413
        assert sent <= 65_536 // 1000 + 2


@given(st.binary(max_size=2000), st.integers(1, 400), st.lists(st.integers(1, 900), max_size=8), st.sampled_from(["gzip", "deflate"]))
@pytest.mark.pure
def test_any_cut_gives_the_same_bytes(data: bytes, repeats: int, cuts: list[int], encoding: str) -> None:
    whole = data * repeats
    packed = PACK[encoding](whole)
    decoder = decoder_of([encoding.encode()])
    made: list[bytes] = []
    first = 0
    for cut in (*cuts, len(packed)):
        parts = list(decoder.parts(packed[first : first + cut]))
        assert all(0 < len(part) <= SLICE_BYTES for part in parts)
        made += parts
        first += cut
    decoder.end()
    assert b"".join(made) == whole


@pytest.mark.pure
def test_a_cut_stream_is_not_whole() -> None:
    inflater = Inflater("gzip", 31)
    list(inflater.parts(PACKED[:-4]))
    with pytest.raises(InvalidRequest, match="ends before"):
        inflater.end()
