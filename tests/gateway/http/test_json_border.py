"""Tests the JSON border, the error table and the configuration, each by itself."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from gateway_kit import gateway_config
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core import errors as core_errors
from headrace.core.errors import ConfigError, HeadraceError, InvalidRequest, ModelNotFound, Overloaded, RequestTooLarge
from headrace.gateway.access.principal import digest_of
from headrace.gateway.config import config_from, load_config
from headrace.gateway.http.errors import INTERNAL_MESSAGE, TABLE, error_reply
from headrace.gateway.http.json_border import Caps, decode_object

pytestmark = pytest.mark.pure

# -- JSON ------------------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), JSON, max_size=5), st.booleans())
def test_what_is_fine_comes_through_unchanged(value: dict[str, Any], ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only)
    try:
        found = decode_object(body.encode("utf-8", "surrogatepass"), Caps(depth=100))
    except HeadraceError:
        assert "\\u0000" in body or "\x00" in body
    else:
        assert found == value


def test_a_byte_order_mark_at_the_beginning_alone_is_left_out() -> None:
    assert decode_object(b'\xef\xbb\xbf{"a": 1}', Caps()) == {"a": 1}
    with pytest.raises(InvalidRequest, match="valid JSON"):
        decode_object(b'\xef\xbb\xbf\xef\xbb\xbf{"a": 1}', Caps())


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_an_object(body: bytes) -> None:
    with suppress(HeadraceError):
        assert isinstance(decode_object(body, Caps(depth=5)), dict)


@pytest.mark.parametrize("depth", [1, 7, 8, 9, 5000])
@pytest.mark.parametrize(("opener", "closer"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_depth_is_exact(depth: int, opener: bytes, closer: bytes) -> None:
    body = b'{"x":' + opener * (depth - 1) + b"1" + closer * (depth - 1) + b"}"
    if depth <= 8:
        decode_object(body, Caps(depth=8))
    else:
        with pytest.raises(InvalidRequest, match="nested at most 8"):
            decode_object(body, Caps(depth=8))


def test_brackets_in_strings_are_text() -> None:
    text = '[[[{{{"\\' * 50
    assert decode_object(json.dumps({"a": text, "b": [1]}).encode(), Caps(depth=2)) == {"a": text, "b": [1]}


def test_depth_is_judged_before_the_rest_is_read() -> None:
    with pytest.raises(InvalidRequest, match="nested at most"):
        decode_object(b"[" * 1_000_000, Caps())


@pytest.mark.parametrize(("number", "is_fine"), [(4, True), (5, False)])
def test_values_and_keys_are_counted(number: int, is_fine: bool) -> None:
    caps = Caps(values=4, keys=4)
    for body in ({"a": [0] * (number + 1)}, {str(key): 0 for key in range(number)}):
        if is_fine:
            assert decode_object(json.dumps(body).encode(), caps) == body
        else:
            with pytest.raises(RequestTooLarge):
                decode_object(json.dumps(body).encode(), caps)


def test_commas_and_colons_in_strings_are_text() -> None:
    body = {"a": ",:" * 1000, "b": '\\",,,'}
    assert decode_object(json.dumps(body).encode(), Caps(values=4, keys=4)) == body


# -- errors ----------------------------------------------------------------------------------------------------------------------


def test_every_error_a_request_can_meet_has_a_row() -> None:
    kinds = {value for value in vars(core_errors).values() if isinstance(value, type) and issubclass(value, HeadraceError)}
    start_up = {core_errors.ConfigError, core_errors.CheckpointError, core_errors.RegistryFailed, HeadraceError}
    engine_only = {kind for kind in kinds if kind.__name__ == "EngineFatal"}
    rows = tuple(kind for kind, _ in TABLE)
    assert HeadraceError not in rows  # or every kind would have a row
    assert [kind for kind in kinds - start_up - engine_only if not issubclass(kind, rows)] == []


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidRequest("top_p", "0 < top_p <= 1", 2), 400, "top_p"),
        (ModelNotFound("x", ["y"]), 404, "model"),
        (Overloaded("full"), 429, None),
    ],
)
def test_reply_is_openais_body(error: HeadraceError, status: int, param: str | None) -> None:
    reply = error_reply(error)
    body = json.loads(reply.body)["error"]
    assert reply.status == status
    assert body["message"] == str(error)
    assert body["param"] == param
    assert set(body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "error", [ValueError("/etc/passwd"), KeyError("sk-secret"), OSError(2, "x", "/srv/model"), ConfigError("/a", "b"), MemoryError()]
)
def test_what_is_not_for_clients_stays_inside(error: Exception) -> None:
    reply = error_reply(error)
    assert reply.status == 500
    assert json.loads(reply.body)["error"]["message"] == INTERNAL_MESSAGE


@pytest.mark.parametrize(("seconds", "header"), [(0.0, b"1"), (1.0, b"1"), (1.2, b"2"), (30.0, b"30")])
def test_retry_after_is_whole_seconds(seconds: float, header: bytes) -> None:
    assert dict(error_reply(Overloaded("full", retry_after_s=seconds)).headers)[b"retry-after"] == header


@given(st.text())
def test_any_text_makes_a_printable_body(text: str) -> None:
    body = error_reply(InvalidRequest(text, "x", text, text)).body
    message = json.loads(body)["error"]["message"]
    assert message.isprintable()
    assert len(body) < 16_000


# -- configuration ---------------------------------------------------------------------------------------------------------------

MODEL = {"name": "m", "folder": "/f", "replicas": [{"name": "r0", "address": "unix:/s"}]}
BAD: list[tuple[str, Any, str]] = [
    ("unknown", {"prot": 1}, "Did you mean port?"),
    ("nested-unknown", {"limits": {"max_mesages": 1}}, "limits.max_mesages"),
    ("replica-unknown", {"models": [{**MODEL, "replicas": [{"name": "r", "adress": "x"}]}]}, "models[0].replicas[0].adress"),
    ("type", {"port": "8000"}, "port"),
    ("port", {"port": 70000}, "port"),
    ("no-model", {"models": []}, "models"),
    ("name-twice", {"models": [MODEL, MODEL]}, "served twice"),
    ("alias-twice", {"models": [{**MODEL, "aliases": ["m"]}]}, "served twice"),
    ("name-path", {"models": [{**MODEL, "name": "../m"}]}, "not a model name"),
    ("no-replica", {"models": [{**MODEL, "replicas": []}]}, "replicas"),
    ("replica-twice", {"models": [{**MODEL, "replicas": [MODEL["replicas"][0]] * 2}]}, "each name once"),
    ("key-short", {"api_keys": [{"key": "short"}]}, "shorter than 8"),
    ("key-none", {"api_keys": [{}]}, "exactly one of key and sha256"),
    ("key-both", {"api_keys": [{"key": "longenough", "sha256": "0" * 64}]}, "exactly one of key and sha256"),
    ("key-digest", {"api_keys": [{"sha256": "xyz"}]}, "hex"),
    ("key-tier", {"api_keys": [{"key": "longenough", "tier": "root"}]}, "premium, standard, free, batch"),
    ("key-twice", {"api_keys": [{"key": "longenough"}, {"key": "longenough"}]}, "twice"),
    ("limit", {"limits": {"max_body_bytes": 0}}, "limits.max_body_bytes"),
    ("timeout", {"timeouts": {"drain_s": -1}}, "timeouts.drain_s"),
    ("salt", {"salt_key": "xyz"}, "salt_key"),
]


@pytest.mark.parametrize(("changes", "words"), [pytest.param(changes, words, id=name) for name, changes, words in BAD])
def test_bad_configuration_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from({"models": [MODEL], **changes})
    assert words in str(caught.value)
    assert "longenough" not in str(caught.value)


def test_keys_are_digests_from_the_start() -> None:
    config = gateway_config(api_keys=[{"key": "sk-12345678", "tenant": "a"}])
    assert config.api_keys[0].key == ""
    assert config.api_keys[0].sha256 == digest_of(b"sk-12345678").hex()
    assert "sk-12345678" not in repr(config)


def test_tenant_defaults_to_a_name_of_the_key() -> None:
    config = gateway_config(api_keys=[{"key": "sk-12345678"}, {"key": "sk-87654321"}])
    names = {key.tenant for key in config.api_keys}
    assert len(names) == 2
    assert not any("sk-" in name for name in names)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"models": 5}', b"\xff"])
def test_unreadable_file_is_a_configuration_error(tmp_path: Any, content: bytes) -> None:
    path = tmp_path / "gateway.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_config(path)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "missing.json")
