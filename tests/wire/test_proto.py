"""Tests that the generated module fits its source and the protobuf releases that the project promises to run with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.wire import headrace_pb2 as pb

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
WIRE = ROOT / "src" / "headrace" / "wire"


def test_the_oldest_protobuf_allowed_is_the_one_the_code_was_generated_for() -> None:
    made = re.search(r"Protobuf Python Version: ([\d.]+)", (WIRE / "headrace_pb2.py").read_text())
    floor = re.search(r'"protobuf>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert made is not None
    assert floor is not None
    assert made.group(1) == floor.group(1), (
        "run `make proto`, or raise the floor in pyproject.toml with the compiler in tools/make_proto.py"
    )


def test_generated_code_is_that_of_the_source() -> None:
    source = re.sub(r"//.*", "", (WIRE / "headrace.proto").read_text())
    for kind, name, body in re.findall(r"(message|enum) (\w+) \{((?:[^{}]|\{[^{}]*\})*)\}", source):
        written = {label: int(number) for label, number in re.findall(r"(\w+) = (\d+);", body)}
        if kind == "enum":
            made = {value.name: value.number for value in pb.DESCRIPTOR.enum_types_by_name[name].values}
        else:
            made = {field.name: field.number for field in pb.DESCRIPTOR.message_types_by_name[name].fields}
        assert written == made, f"{name} differs: run `make proto`"


def test_no_number_of_an_enum_means_nothing_by_default() -> None:
    """Zero is what a missing field reads as, so it never is a value."""
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values[0].number == 0
        assert enum.values[0].name.endswith("_UNSPECIFIED")
