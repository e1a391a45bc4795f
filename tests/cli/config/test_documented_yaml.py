"""Tests the YAML of the documentation: every key in it is one that the configuration has, with a value of its type.

What the values name (folders, servers, certificates) is not there in a test.
"""

from __future__ import annotations

import re

import pytest

from headrace.cli.config.load import INSTEAD
from headrace.cli.config.sections import ServeConfig
from headrace.cli.config.yaml_files import parse_yaml
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode
from headrace.engine.server.config import process_config_from
from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [pytest.param(text, id=f"{page.stem}-{number}") for page in PAGES for number, text in enumerate(BLOCK.findall(page.read_text()))]


def decode_block(text: str) -> None:
    """Raises ConfigError. A file of `headrace engine` is known by its key `replica`."""
    raw = parse_yaml(text, "the documentation")
    assert isinstance(raw, dict)
    if "replica" in raw:
        process_config_from(raw)
        return
    decode(ServeConfig, {"models": [], **raw}, refused=INSTEAD)  # docs/usage.md shows one section of a file


@pytest.mark.parametrize("text", BLOCKS)
def test_yaml_of_the_documentation_is_a_configuration(text: str) -> None:
    decode_block(text)


@pytest.mark.parametrize("text", ["tiers: {free: {requests_per_minut: 1}}", "gateway: {limit: {}}", "replica: a\naddres: b"])
def test_wrong_yaml_would_be_found(text: str) -> None:
    with pytest.raises(ConfigError):
        decode_block(text)
