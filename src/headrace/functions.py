"""Python functions as tools: the JSON Schema of their arguments from type hints and docstring, and calls with a model's arguments.

    weather = functions_in("weather.py")["get_weather"]       # every public function of the file, by name
    weather.tool.requested()                                  # an entry of a request's `tools`
    weather.answer('{"city": "Paris"}')                       # the result as text, for a message of role tool

Loading a file runs it, and a call runs its function: give only files that you would run yourself. `headrace agent` does both; with
another client it is a few lines (examples/agent.py).
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_type_hints

import msgspec

from headrace.core.errors import InvalidRequest
from headrace.core.tools import FunctionTool

MAX_RESULT_CHARS = 16_384
"""Characters of a result; a longer one is cut, and says so, so that one call does not fill the model's context."""

TYPES = "str, int, float, bool, list, dict, Optional, Literal, Enum, dataclass, TypedDict"
_REF = "#/$defs/{name}"
_ARGUMENTS = re.compile(r"\s*(Args|Arguments|Parameters):\s*")
_ARGUMENT = re.compile(r"\s+\*{0,2}(?P<name>\w+)\s*(\([^)]*\))?:\s*(?P<text>.+)")
_BEYOND_STRICT = {"uniqueItems", "prefixItems", "contentEncoding", "format"}
"""Keywords that OpenAI's strict functions do not have."""


@dataclass(frozen=True, slots=True)
class PythonFunction:
    """A function that a model may call. `of` makes one."""

    function: Callable[..., object]
    tool: FunctionTool
    arguments: type[msgspec.Struct]

    @classmethod
    def of(cls, function: Callable[..., object]) -> PythonFunction:
        """Raises InvalidRequest naming the function, or the parameter, that no JSON Schema describes."""
        name = function.__name__
        arguments = msgspec.defstruct(name, list(_fields(function)), forbid_unknown_fields=True)
        parameters = _schema(arguments, name)
        description, _ = _documented(function)
        tool = FunctionTool(name=name, description=description, parameters=parameters, is_strict=_is_strict(parameters))
        return cls(function, tool.checked(field=name), arguments)

    def answer(self, arguments: str) -> str:
        """Call the function with the arguments that a model wrote. Its result as text: a string as it is, anything else as JSON.

        Whatever goes wrong is the answer, so that the model can do better: arguments that do not fit, and what the function raises.
        """
        try:
            given = msgspec.json.decode(arguments or "{}", type=self.arguments)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            return _shortened(f"error: the arguments do not fit: {error}")
        try:
            result = self.function(**{name: getattr(given, name) for name in self.arguments.__struct_fields__})
            text = result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=str).decode()
        except Exception as error:
            return _shortened(f"error: {type(error).__name__}: {error}")
        return _shortened(text)


def functions_in(path: str | Path) -> dict[str, PythonFunction]:
    """The functions of a Python file by name: those in its `__all__`, else those that it defines and whose names have no leading _.

    Runs the file. Raises InvalidRequest for a file that cannot be run, that has no function, or with one that no model can call.
    """
    module = _loaded(Path(path).resolve())
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = {name: getattr(module, name, None) for name in names}
    own = [each for each in found.values() if inspect.isfunction(each) and each.__module__ == module.__name__]
    if not own:
        raise InvalidRequest("--tool", "a file that defines functions", str(path))
    return {made.tool.name: made for made in map(PythonFunction.of, own)}


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"headrace_tools:{path}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidRequest("--tool", "a Python file", str(path))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look their type hints up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidRequest("--tool", "a Python file that runs", str(path), f"{type(error).__name__}: {error}") from error
    return module


def _fields(function: Callable[..., object]) -> Iterator[tuple[str, Any] | tuple[str, Any, Any]]:
    """The function's parameters as fields of a struct."""
    name = function.__name__
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise InvalidRequest(name, "a function that returns its result", None, "Wrap it in a plain function.")
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # a hint is any expression
        raise InvalidRequest(name, "type hints that can be read", None, f"{type(error).__name__}: {error}") from error
    _, texts = _documented(function)
    for parameter in inspect.signature(function).parameters.values():
        field = f"{name}.{parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidRequest(field, "a parameter that is given by name", str(parameter))
        if parameter.name not in hints:
            raise InvalidRequest(field, f"a type hint: {TYPES}")
        kind = hints[parameter.name]
        if text := texts.get(parameter.name):
            kind = Annotated[kind, msgspec.Meta(description=text)]
        _check_expressible(kind, field)
        has_default = parameter.default is not parameter.empty
        yield (parameter.name, kind, _default(parameter.default)) if has_default else (parameter.name, kind)


def _default(value: object) -> object:
    """msgspec takes no mutable default but an empty one; a function's own default is shared anyway."""
    return msgspec.field(default_factory=lambda: value) if isinstance(value, list | dict | set) else value


def _check_expressible(kind: object, field: str) -> None:
    try:
        msgspec.json.schema_components([kind])
    except TypeError as error:
        remedy = str(error).strip().splitlines()[-1]
        raise InvalidRequest(field, f"a type hint that JSON can express: {TYPES}", None, f"{remedy[:1].upper()}{remedy[1:]}.") from None


def _schema(arguments: type[msgspec.Struct], name: str) -> dict[str, Any]:
    """The arguments' schema, complete in itself. Objects have no other members than those declared."""
    _, definitions = msgspec.json.schema_components([arguments], ref_template=_REF)
    for schema in definitions.values():
        schema.pop("title", None)
        if "properties" in schema:
            schema["additionalProperties"] = False
    made: dict[str, Any] = definitions.pop(name)
    return {**made, "$defs": definitions} if definitions else made


def _is_strict(schema: object) -> bool:
    """Whether OpenAI's rules for strict functions hold: every member is required, and no object is open."""
    if isinstance(schema, list):
        return all(map(_is_strict, schema))
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object" and (schema.get("additionalProperties") is not False or "properties" not in schema):
        return False
    if set(schema.get("properties", ())) != set(schema.get("required", ())) or _BEYOND_STRICT & schema.keys():
        return False
    return all(map(_is_strict, schema.values()))


def _documented(function: Callable[..., object]) -> tuple[str, Mapping[str, str]]:
    """A docstring's first paragraph on one line, and the texts of its `Args:` section by parameter."""
    lines = (inspect.getdoc(function) or "").splitlines()
    summary = " ".join(line.strip() for line in takewhile(lambda line: line.strip() and not _ARGUMENTS.fullmatch(line), lines))
    begin = next((number for number, line in enumerate(lines) if _ARGUMENTS.fullmatch(line)), len(lines))
    section = takewhile(lambda line: not line.strip() or line.startswith(" "), lines[begin + 1 :])
    return summary, {match["name"]: match["text"].strip() for line in section if (match := _ARGUMENT.fullmatch(line))}


def _shortened(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARS:
        return text
    return f"{text[:MAX_RESULT_CHARS]} [cut: {len(text)} characters in all]"
