"""Encodes plans as bytes and decodes them, for replay files and for ranks in other processes, without pickle.

    plan   = header length (u32) | header (JSON, utf-8) | columns, back to back, 4 bytes per entry, little endian
    header = {"step_id", "costs": [fixed_s, token_s], "started": [...], "columns": [their lengths]}
    file   = MAGIC | plan length (u32) | plan | plan length | plan ...

The columns are COLUMNS, then one of token ids per started sequence. Every length is checked against the bytes that follow before they
are read.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from headrace.core.errors import HeadraceError
from headrace.core.grammar import Grammar
from headrace.core.ids import SlotId
from headrace.core.plan import UNKNOWN_COSTS, MoveKind, Plan, Started, StepCosts
from headrace.core.sampling import SamplingParams

MAGIC = b"HRPLAN3\n"
MAX_PLAN_BYTES = 256 * 1024 * 1024
COLUMNS = tuple(f.name for f in fields(Plan) if f.name not in ("step_id", "started", "costs"))
MOVE_COLUMNS = tuple(name for name in COLUMNS if name.startswith("move_"))
_KINDS = frozenset(MoveKind)
_U32 = struct.Struct("<I")
ENTRY_BYTES = 4


class PlanCodecError(HeadraceError):
    """The bytes are no encoded plan."""


def encode_plan(plan: Plan) -> bytes:
    columns = [getattr(plan, name) for name in COLUMNS] + [s.token_ids for s in plan.started]
    header = {
        "step_id": plan.step_id,
        "costs": list(plan.costs),
        "started": [_started_to_json(s) for s in plan.started],
        "columns": [len(column) for column in columns],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return _U32.pack(len(text)) + text + b"".join(_little_endian(column).tobytes() for column in columns)


def decode_plan(data: bytes) -> Plan:
    """Raises PlanCodecError for what `encode_plan` did not write."""
    try:
        return _decode(memoryview(data))
    except (ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise PlanCodecError(f"not a plan: {error}") from error


def dump_plans(plans: Iterable[Plan]) -> bytes:
    parts = [MAGIC]
    for plan in plans:
        data = encode_plan(plan)
        parts += [_U32.pack(len(data)), data]
    return b"".join(parts)


def load_plans(data: bytes) -> list[Plan]:
    """Raises PlanCodecError."""
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
    (length,) = _U32.unpack_from(data, 0)
    begin = _U32.size + length
    header: dict[str, Any] = json.loads(bytes(data[_U32.size : begin]))
    entries, lengths = header["started"], header["columns"]
    if not isinstance(lengths, list) or not all(type(n) is int and n >= 0 for n in lengths):
        raise ValueError("column lengths are no counts")
    if len(lengths) != len(COLUMNS) + len(entries):
        raise ValueError("column lengths do not match")
    if begin + ENTRY_BYTES * sum(lengths) != len(data):
        raise ValueError("columns do not fill the data")
    found = _columns(data[begin:], lengths)
    columns = {name: next(found) for name in COLUMNS}
    _check_moves(columns)
    started = tuple(_started(entry, next(found)) for entry in entries)
    fixed_s, token_s = map(float, header.get("costs", UNKNOWN_COSTS))
    return Plan(step_id=int(header["step_id"]), started=started, costs=StepCosts(fixed_s, token_s), **columns)


def _columns(data: memoryview, lengths: list[int]) -> Iterator[array[int]]:
    begin = 0
    for length in lengths:
        column = array("i")
        column.frombytes(bytes(data[begin : begin + ENTRY_BYTES * length]))
        begin += ENTRY_BYTES * length
        yield _little_endian(column)


def _little_endian(column: array[int]) -> array[int]:
    """Between this machine's byte order and little endian; the same both ways."""
    if sys.byteorder == "big":
        column = array("i", column)
        column.byteswap()
    return column


def _check_moves(columns: Mapping[str, array[int]]) -> None:
    if len({len(columns[name]) for name in MOVE_COLUMNS}) > 1:
        raise ValueError("the columns of moves differ in length")
    if unknown := set(columns["move_kinds"]) - _KINDS:
        raise ValueError(f"unknown kinds of moves: {sorted(unknown)}")


def _started(entry: Mapping[str, Any], token_ids: array[int]) -> Started:
    params = dict(entry["params"])
    params["logit_bias"] = {int(key): float(value) for key, value in params["logit_bias"].items()}
    return Started(
        SlotId(int(entry["slot"])),
        token_ids,
        int(entry["num_prompt_tokens"]),
        SamplingParams(**params),
        int(entry["index"]),
        None if entry.get("grammar") is None else Grammar.from_fields(entry["grammar"]),
    )


def _started_to_json(started: Started) -> dict[str, Any]:
    entry = {
        "slot": started.slot,
        "num_prompt_tokens": started.num_prompt_tokens,
        "index": started.index,
        "params": _params_to_json(started.params),
    }
    return entry if started.grammar is None else {**entry, "grammar": asdict(started.grammar)}


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    given = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
    given["logit_bias"] = dict(params.logit_bias)
    return given
