"""Tests compressed bodies: the same request as the plain one, within the same bound, whatever they are said to hold."""

from __future__ import annotations

import gzip
import sys
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx2
import msgspec
import pytest
from gateway_kit import TestBench, chat_body, dial, open_bench, post, serving
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest
from headrace.gateway.http.content_encoding import CODINGS, MAX_CODINGS, MAX_STREAMS, SLICE_BYTES, decoder_of
from headrace.gateway.http.errors import BodyTooLarge, UnsupportedEncoding, error_reply
from headrace.text.folder import TextModel

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.loop


def gzipped(data: bytes) -> bytes:
    """The same bytes at any time: gzip's head has the time, and a test's name is the same in every process that collects it."""
    return gzip.compress(data, mtime=0)


def bare(data: bytes) -> bytes:
    """deflate without zlib's frame."""
    return zlib.compress(data, wbits=-15)


def framed(data: bytes, **parameters: int) -> bytes:
    """One zstd frame of unknown length."""
    options = {getattr(zstd.CompressionParameter, name): value for name, value in parameters.items()}
    compressor = zstd.ZstdCompressor(options=options)
    return compressor.compress(data) + compressor.flush()


def skipped(size: int, kind: int = 0) -> bytes:
    """A zstd frame to skip."""
    return bytes([0x50 + kind]) + b"\x2a\x4d\x18" + size.to_bytes(4, "little") + bytes(size)


PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzipped, "x-gzip": gzipped, "deflate": zlib.compress, "zstd": framed}
BODY = msgspec.json.encode(chat_body(seed=1))


GZIP_HEAD, EMPTY_BLOCK = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff", b"\x00\x00\x00\xff\xff"


def packed(data: bytes, codings: Sequence[str]) -> bytes:
    for coding in codings:
        data = PACK[coding](data)
    return data


def decoded(body: bytes, *values: str, max_bytes: int = 1 << 30, cut: int = 0) -> bytes:
    """A body decoded whole, or in pieces of `cut` bytes."""
    decoder = decoder_of([value.encode() for value in values], max_bytes)
    pieces = [body[first : first + cut] for first in range(0, len(body), cut)] if cut else [body]
    made = b"".join(part for piece in pieces for part in decoder.parts(piece))
    decoder.end()
    return made


async def send(bench: TestBench, body: bytes, *encodings: str) -> httpx2.Response:
    headers = [("content-type", "application/json"), *(("content-encoding", name) for name in encodings)]
    return await bench.client.post("/v1/chat/completions", content=body, headers=headers)


@pytest.mark.parametrize("encoding", PACK)
async def test_a_compressed_body_is_the_same_request(bench: TestBench, encoding: str) -> None:
    assert (await send(bench, BODY)).status_code == 200
    assert (await send(bench, PACK[encoding](BODY), encoding)).status_code == 200
    plain, packed = bench.replica.requests
    assert (packed.prompt_ids, packed.params, packed.salt) == (plain.prompt_ids, plain.params, plain.salt)


@pytest.mark.parametrize(
    ("encodings", "named"),
    [
        (("br",), '"br" is not read'),
        (("gzip, br",), '"br" is not read'),
        (("gzip", "compress"), '"compress" is not read'),
        (("aws-chunked",), '"aws-chunked" is not read'),
        (("gzip;q=1.0",), '"gzip;q=1.0" is not read'),
        (("nonsense" * 50,), "is not read"),
        (("gzip, gzip", "gzip", "deflate"), '"gzip, gzip, gzip, deflate" has more than 3 codings'),
    ],
)
async def test_another_encoding_is_refused_by_name_with_what_is_taken(bench: TestBench, encodings: tuple[str, ...], named: str) -> None:
    response = await send(bench, gzipped(BODY), *encodings)
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert named in response.json()["error"]["message"]
    assert "gzip, deflate, zstd or identity" in response.json()["error"]["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate, zstd"


async def test_what_a_client_called_its_encoding_is_not_logged(text: TextModel, tmp_path: Path) -> None:
    async with open_bench(text, request_log=str(tmp_path / "log")) as bench:
        await send(bench, BODY, "my-secret")
    logged = (tmp_path / "log").read_text()
    assert "The Content-Encoding is not read here." in logged
    assert "my-secret" not in logged


@pytest.mark.pure
def test_what_is_named_as_read_is_read() -> None:
    named = dict(error_reply(UnsupportedEncoding("br")).headers)[b"accept-encoding"].decode().split(", ")
    assert {*named, "x-gzip"} == set(CODINGS)


@pytest.mark.parametrize("encodings", [("identity",), ("Identity, ,identity",), ("",), (",", "")])
async def test_identity_is_no_encoding(bench: TestBench, encodings: tuple[str, ...]) -> None:
    assert (await send(bench, BODY, *encodings)).status_code == 200


@pytest.mark.pure
@pytest.mark.parametrize(
    ("values", "codings"),
    [
        (("GZIP",), ("gzip",)),
        (("X-Gzip",), ("gzip",)),
        (("gzip, identity",), ("gzip",)),
        (("identity", "gzip"), ("gzip",)),
        ((" ,gzip ,\t, ",), ("gzip",)),
        (("deflate, gzip",), ("deflate", "gzip")),
        (("deflate", "ZSTD"), ("deflate", "zstd")),
        (("gzip,gzip",), ("gzip", "gzip")),
        (("zstd,deflate", "identity,gzip"), ("zstd", "deflate", "gzip")),
    ],
)
def test_a_list_of_codings_is_undone_from_its_end(values: tuple[str, ...], codings: tuple[str, ...]) -> None:
    assert decoded(packed(BODY, codings), *values) == BODY


PACKED = gzipped(BODY)


@pytest.mark.pure
@pytest.mark.parametrize("cut", [0, 1, 2, 3, 7])
@pytest.mark.parametrize(
    ("coding", "body", "expected"),
    [
        ("gzip", PACKED + PACKED, BODY + BODY),
        ("gzip", gzipped(b"") * 40 + PACKED + gzipped(b""), BODY),
        ("gzip", PACKED + b"\0", BODY),
        ("gzip", PACKED + PACKED + bytes(100_000), BODY + BODY),
        ("deflate, gzip", gzipped(zlib.compress(BODY)) + bytes(512), BODY),
        ("deflate", zlib.compress(BODY), BODY),
        ("deflate", zlib.compress(BODY, 0), BODY),
        ("deflate", zlib.compress(b""), b""),
        ("deflate", bare(BODY), BODY),
        ("deflate", bare(b""), b""),
        ("deflate", bare(bytes(range(256)) * 300), bytes(range(256)) * 300),
        ("deflate", zlib.compress(BODY, 0, wbits=-15), BODY),
        ("zstd", zstd.compress(BODY), BODY),
        ("zstd", framed(BODY, checksum_flag=1), BODY),
        ("zstd", framed(BODY) + framed(BODY), BODY + BODY),
        ("zstd", skipped(0) + framed(BODY) + skipped(9, 15) + framed(b"") + skipped(3, 7), BODY),
        ("zstd", skipped(5), b""),
        ("zstd", zstd.compress(bytes(3 << 20)), bytes(3 << 20)),
    ],
)
def test_what_a_coding_allows_is_decoded(coding: str, body: bytes, expected: bytes, cut: int) -> None:
    """Several members or frames, empty ones, frames to skip; zeros behind gzip, as tapes have them; deflate in zlib's frame and bare."""
    assert decoded(body, coding, cut=cut) == expected


@pytest.mark.pure
@pytest.mark.parametrize(
    ("coding", "body", "said"),
    [
        ("deflate", zlib.compress(BODY) * 2, "one deflate stream. Other bytes follow its end"),
        ("deflate", bare(BODY) + b"x", "one deflate stream. Other bytes follow its end"),
        ("deflate", bare(BODY)[:-1], "ends before"),
        ("deflate", b"\x78", "ends before"),
        ("deflate", b"\xff" * 10, "damaged"),
        ("gzip", PACKED + b"xy", "gzip streams alone. Other bytes follow its end"),
        ("gzip", PACKED + bytes(9) + b"x", "gzip streams alone. Other bytes follow its end"),
        ("gzip", PACKED + bytes(9) + PACKED, "gzip streams alone. Other bytes follow its end"),
        ("gzip", bytes(9) + PACKED, "damaged"),
        ("gzip", bytes(9), "damaged"),
        ("gzip", PACKED[:-4] + bytes(9), "damaged"),
        ("zstd", framed(BODY) + bytes(9), "zstd streams alone. Other bytes follow its end"),
        ("deflate", zlib.compress(BODY) + bytes(9), "one deflate stream. Other bytes follow its end"),
        ("gzip", PACKED + PACKED[:9], "ends before"),
        ("zstd", b"", "ends before"),
        ("zstd", framed(BODY)[:-1], "ends before"),
        ("zstd", skipped(9)[:-1], "ends before"),
        ("zstd", PACKED, "damaged"),
        ("zstd", framed(BODY) + b"xy", "zstd streams alone. Other bytes follow its end"),
        ("zstd", framed(BODY, checksum_flag=1)[:-1] + b"\0", "damaged"),
        ("zstd", framed(BODY, window_log=24), "a window of at most 8 MiB"),
        ("zstd", framed(BODY) + framed(BODY, window_log=27), "a window of at most 8 MiB"),
        ("zstd", b"\x28\xb5\x2f\xfd\x00\xff", "a window of at most 8 MiB"),
        ("gzip, zstd", framed(PACKED[:-4]), "ends before"),
        ("zstd, gzip", gzipped(framed(BODY) + b"xy"), "Other bytes follow"),
    ],
)
def test_what_is_damaged_is_refused_by_name(coding: str, body: bytes, said: str) -> None:
    for cut in (0, 1, 3):
        with pytest.raises(InvalidRequest, match=said):
            decoded(body, coding, cut=cut)


@pytest.mark.pure
def test_the_largest_window_that_every_decoder_takes_is_taken() -> None:
    assert decoded(framed(BODY, window_log=23), "zstd") == BODY
    assert decoded(zstd.compress(BODY * 1000, level=19), "zstd") == BODY * 1000


@pytest.mark.pure
@pytest.mark.parametrize("codings", [("gzip", "gzip"), ("zstd", "gzip"), ("deflate", "zstd"), ("zstd",) * MAX_CODINGS])
def test_what_one_coding_makes_for_the_next_is_bounded_too(codings: tuple[str, ...]) -> None:
    """However little the last one makes of it: empty blocks, frames to skip."""
    nothing = {"gzip": GZIP_HEAD + EMPTY_BLOCK * 500_000, "zstd": skipped(1 << 20) * 4, "deflate": zlib.compress(bytes(1 << 21))}
    bomb = packed(nothing[codings[0]], codings[1:])
    made: list[int] = []
    decoder = decoder_of([", ".join(codings).encode()], 1 << 20)
    with pytest.raises(BodyTooLarge, match="at most 1048576 bytes"):
        made.extend(len(part) for part in decoder.parts(bomb))
    assert sum(made) <= 1 << 20


@pytest.mark.pure
def test_streams_are_counted() -> None:
    for coding, one in (("gzip", gzipped(b"x")), ("zstd", framed(b"x"))):
        assert decoded(one * MAX_STREAMS, coding) == b"x" * MAX_STREAMS
        with pytest.raises(InvalidRequest, match=rf"body: expected at most {MAX_STREAMS} {coding} streams. Compress it as one"):
            decoded(one * (MAX_STREAMS + 1), coding)


@pytest.mark.pure
def test_between_two_streams_that_give_nothing_others_are_served() -> None:
    """Each is a part of its own, though an empty one: the event loop goes round between two parts."""
    for coding, nothing in (("gzip", gzipped(b"")), ("zstd", skipped(0)), ("zstd", framed(b""))):
        assert list(decoder_of([coding.encode()], 10).parts(nothing * 50)) == [b""] * 50


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (BODY, "damaged"),
        (PACKED[:-1], "ends before"),
        (b"", "ends before"),
        (PACKED[:20] + b"\xff" + PACKED[21:], "damaged"),
        (PACKED + b"x", "follow its end"),
        (zlib.compress(BODY), "damaged"),
    ],
    ids=["plain", "cut", "empty", "damaged", "trailing", "deflate"],
)
async def test_damaged_gzip_is_refused(bench: TestBench, body: bytes, said: str) -> None:
    response = await send(bench, body, "gzip")
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "body", "invalid_value")
    assert said in error["message"]


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """256 MiB in a quarter of one: a thousand to one."""
    return gzipped(bytes(256 << 20))


@pytest.fixture(scope="module", params=["gzip", "zstd", "zstd, gzip"])
def any_bomb(request: pytest.FixtureRequest, bomb: bytes) -> tuple[str, bytes]:
    """256 MiB in as little as the codings make of it."""
    made = {"gzip": lambda: bomb, "zstd": lambda: zstd.compress(bytes(256 << 20))}
    return request.param, made[request.param]() if request.param in made else gzipped(made["zstd"]())


async def test_a_bomb_is_refused_before_it_goes_off(text: TextModel, any_bomb: tuple[str, bytes]) -> None:
    """Decoded at once it would take 256 MiB; the cap here is 1 MiB, and what is made beyond it is one slice."""
    encoding, bomb = any_bomb
    assert len(bomb) < 270_000
    async with open_bench(text) as bench:
        await bench.chat(max_tokens=1)
        tracemalloc.start()
        response = await send(bench, bomb, encoding)
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
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        yield GZIP_HEAD
        while True:
            sent += 1
            yield EMPTY_BLOCK * 200

    async with open_bench(text, limits={"max_body_bytes": 65_536}) as bench:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        response = await bench.client.post("/v1/chat/completions", content=chunks(), headers=headers)
        assert response.status_code == 413
        assert sent <= 65_536 // 1000 + 2


@given(
    st.binary(max_size=2000),
    st.integers(1, 400),
    st.lists(st.integers(1, 900), max_size=8),
    st.lists(st.sampled_from(["gzip", "deflate", "zstd"]), min_size=1, max_size=MAX_CODINGS),
)
@pytest.mark.pure
def test_any_cut_gives_the_same_bytes(data: bytes, repeats: int, cuts: list[int], codings: list[str]) -> None:
    whole = data * repeats
    body = packed(whole, codings)
    decoder = decoder_of([", ".join(codings).encode()], len(whole) + 200)
    made: list[bytes] = []
    first = 0
    for cut in (*cuts, len(body)):
        parts = list(decoder.parts(body[first : first + cut]))
        assert parts
        assert all(len(part) <= SLICE_BYTES for part in parts)
        made += parts
        first += cut
    decoder.end()
    assert b"".join(made) == whole


@pytest.mark.pure
def test_a_cut_stream_is_not_whole() -> None:
    decoder = decoder_of([b"gzip"], len(BODY))
    assert b"".join(decoder.parts(PACKED[:-4])) == BODY
    with pytest.raises(InvalidRequest, match="ends before"):
        decoder.end()
