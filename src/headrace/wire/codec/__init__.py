"""Converts core values to wire messages and back: pure functions, one module per kind of value.

Encoding refuses what the wire cannot carry with InvalidRequest. Decoding checks the schema and raises MalformedFrame; the rules of the
values live in core.
"""

from __future__ import annotations

from headrace.wire.codec.engine_facts import decode_adapters, decode_load, decode_model_info, encode_load, encode_model_info
from headrace.wire.codec.request import (
    check_known_fields,
    decode_cancel,
    decode_finish,
    decode_submit,
    encode_cancel,
    encode_finish,
    encode_submit,
)
from headrace.wire.codec.update import decode_rejected, encode_rejected, encode_updates

__all__ = [
    "check_known_fields",
    "decode_adapters",
    "decode_cancel",
    "decode_finish",
    "decode_load",
    "decode_model_info",
    "decode_rejected",
    "decode_submit",
    "encode_cancel",
    "encode_finish",
    "encode_load",
    "encode_model_info",
    "encode_rejected",
    "encode_submit",
    "encode_updates",
]
