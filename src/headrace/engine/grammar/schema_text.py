"""Reads the text of a JSON schema. Integers stay exact, and a number without a fraction is read as an integer, however it was written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NoReturn

from headrace.core.errors import InvalidRequest
from headrace.engine.grammar.limits import MAX_JSON_DEPTH


def read_schema(text: str) -> Any:
    """The value of a text that is one JSON document, at most MAX_JSON_DEPTH levels deep. Raises InvalidRequest."""
    try:
        schema = _DECODER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidRequest("grammar", "a JSON schema as JSON text", remedy=f"It is not JSON: {error}") from error
    _check_depth(schema)
    return schema


def read_embedded(text: str, begin: int) -> tuple[Any, int] | None:
    """(value, end offset) of the JSON value that begins at an offset; None where there is none. Raises InvalidRequest if it is too deep."""
    try:
        schema, end = _DECODER.raw_decode(text, begin)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return None
    _check_depth(schema)
    return schema, end


def _check_depth(schema: Any) -> None:
    if sum(1 for _ in _levels(schema)) > MAX_JSON_DEPTH:
        raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest("grammar", f"a JSON schema of at most {MAX_JSON_DEPTH} levels", remedy="Move parts of it to $defs.")


def _levels(value: Any) -> Iterator[list[dict[str, Any] | list[Any]]]:
    """The objects and arrays of each level, outermost first."""
    level = [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        yield level
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]


def _number(digits: str) -> int | float:
    value = float(digits)
    if not math.isfinite(value):
        raise InvalidRequest("grammar", "numbers that a 64-bit float can hold", digits)
    if not value or not value.is_integer():
        return value or 0
    exact = Decimal(digits)
    return int(exact) if exact == exact.to_integral_value() else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_refuse_constant)
