"""Tests that the list of options is frozen, and that every option is documented. Adding one is a decision, made here in plain sight."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from headrace.cli.config.load import file_keys
from tests.house.options import config_options, flags, listing
from tests.house.reader import ROOT
from tools.option_tables import SERVER_FLAGS, keys_of

pytestmark = pytest.mark.pure

FROZEN = Path(__file__).with_name("options.txt")
VLLM_FLAGS = """
    --model --served-model-name --max-model-len --max-num-seqs --max-num-batched-tokens --port --host --api-key --seed --dtype
    --enable-chunked-prefill --no-enable-chunked-prefill --enable-prefix-caching --no-enable-prefix-caching --scheduling-policy
    --gpu-memory-utilization --block-size --load-format
"""


def test_options_are_those_written_down() -> None:
    frozen, now = FROZEN.read_text(encoding="utf-8"), listing()
    difference = "\n".join(difflib.unified_diff(frozen.splitlines(), now.splitlines(), "written down", "now", lineterm="", n=0))
    assert frozen == now, f"\n{difference}\nIf it is meant: python -m tests.house.options > tests/house/options.txt"


def test_flags_people_know_from_vllm_are_there() -> None:
    serve = dict(flags())["headrace serve"].split()
    assert not set(VLLM_FLAGS.split()) - set(serve)


def test_a_flag_sets_what_a_file_has() -> None:
    """Commands that must start at once declare their flags without the options (`cli.flags.rows`)."""
    keys = [leaf.path for leaf in file_keys()]
    for flag in SERVER_FLAGS:
        for path in map(keys_of, flag.paths):
            assert any(key == path or key.startswith((f"{path}.", f"{path}[")) for key in keys), path


def test_every_key_and_flag_is_documented() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    missing = [path for path, _ in config_options() if f"`{path}`" not in page]
    missing += [word for word in dict(flags())["headrace serve"].split() if word.startswith("--") and f"`{word}`" not in page]
    assert not missing, f"docs/config.md does not name: {', '.join(missing)}"
