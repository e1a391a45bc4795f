"""Plans as bytes: for the replay file, and for ranks in other processes. Never pickle.

    plan   = header length (u32) | header (JSON, utf-8) | columns, back to back, int32 little endian
    header = {"step_id", "columns": [lengths in COLUMNS order], "started": [...]}
    file   = MAGIC | plan length (u32) | plan | plan length | plan ...

Every length is checked against what is there before anything is read.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.ids import SlotId
from headrace.core.plan import Plan, Started
from headrace.core.sampling import SamplingParams

MAGIC = b"HRPLAN1\n"
MAX_PLAN_BYTES = 256 * 1024 * 1024
COLUMNS = tuple(f.name for f in fields(Plan) if f.name not in ("step_id", "started"))
_U32 = struct.Struct("<I")


class PlanCodecError(HeadraceError):
    """Bytes that are not a plan."""


def encode_plan(plan: Plan) -> bytes:
    """One plan as bytes."""
    columns = [getattr(plan, name) for name in COLUMNS] + [started.token_ids for started in plan.started]
    header = {
        "step_id": plan.step_id,
        "columns": [len(column) for column in columns],
        "started": [
            {"slot": s.slot, "num_prompt_tokens": s.num_prompt_tokens, "index": s.index, "params": _params_to_json(s.params)}
            for s in plan.started
        ],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return _U32.pack(len(text)) + text + b"".join(_column_bytes(column) for column in columns)


def decode_plan(data: bytes) -> Plan:
    """The plan `encode_plan` wrote. Raises PlanCodecError for anything else."""
    try:
        return _decode(memoryview(data))
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise PlanCodecError(f"not a plan: {error}") from error


def dump_plans(plans: Iterable[Plan]) -> bytes:
    """A replay file's content."""
    parts = [MAGIC]
    for plan in plans:
        data = encode_plan(plan)
        parts += [_U32.pack(len(data)), data]
    return b"".join(parts)


def load_plans(data: bytes) -> list[Plan]:
    """The plans of a replay file. Raises PlanCodecError."""
    if not data.startswith(MAGIC):
        raise PlanCodecError(f"not a plan dump: the file does not begin with {MAGIC!r}")
    plans, position = [], len(MAGIC)
    while position < len(data):
        if position + _U32.size > len(data):
            raise PlanCodecError("truncated plan length")
        (length,) = _U32.unpack_from(data, position)
        position += _U32.size
        if length > MAX_PLAN_BYTES or position + length > len(data):
            raise PlanCodecError(f"a plan of {length} bytes does not fit the file")
        plans.append(decode_plan(data[position : position + length]))
        position += length
    return plans


def _decode(data: memoryview) -> Plan:
    (header_length,) = _U32.unpack_from(data, 0)
    header = json.loads(bytes(data[_U32.size : _U32.size + header_length]))
    lengths = header["columns"]
    if len(lengths) != len(COLUMNS) + len(header["started"]) or not all(isinstance(n, int) and n >= 0 for n in lengths):
        raise ValueError("column lengths do not match")
    position = _U32.size + header_length
    if position + 4 * sum(lengths) != len(data):
        raise ValueError("columns do not fill the data")
    columns = []
    for length in lengths:
        columns.append(_read_column(data[position : position + 4 * length]))
        position += 4 * length
    named = dict(zip(COLUMNS, columns, strict=False))
    started = tuple(_started(entry, ids) for entry, ids in zip(header["started"], columns[len(COLUMNS) :], strict=True))
    return Plan(step_id=int(header["step_id"]), started=started, **named)


def _started(entry: Mapping[str, Any], token_ids: array[int]) -> Started:
    params = dict(entry["params"])
    params["logit_bias"] = {int(key): float(value) for key, value in params["logit_bias"].items()}
    return Started(SlotId(int(entry["slot"])), token_ids, int(entry["num_prompt_tokens"]), SamplingParams(**params), int(entry["index"]))


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    given = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
    given["logit_bias"] = dict(params.logit_bias)
    return given


def _column_bytes(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array("i", column)
        column.byteswap()
    return column.tobytes()


def _read_column(data: memoryview) -> array[int]:
    column = array("i")
    column.frombytes(bytes(data))
    if sys.byteorder == "big":
        column.byteswap()
    return column
