"""Tests that the list of options is frozen, and that every option is documented. Adding one is a decision, made here in plain sight."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from headrace.cli.config.load import file_keys
from headrace.cli.flags.rows import GATEWAY_FLAGS, SERVE_FLAGS
from tests.house.options import config_options, flags, listing
from tests.house.reader import ROOT
from tools.option_tables import ENGINE

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


def test_flags_of_options_are_those_of_the_commands() -> None:
    """Commands that must start at once declare their flags without the options (`cli.flags.rows`): each sets the key that says so."""
    said = {
        leaf.path.replace("models[N]", "model"): set(leaf.option.flags or ()) for leaf in file_keys() if not leaf.path.startswith(ENGINE)
    }
    taken = {flag for command in ("headrace serve", "headrace gateway") for flag in dict(flags())[command].split()}
    assert {flag for names in said.values() for flag in names if flag.startswith("--")} <= taken
    for flag in (*SERVE_FLAGS, *GATEWAY_FLAGS):
        for path in flag.paths:
            if path in said and flag.names and flag.field != "workers":  # --workers is what serve calls --gateway-workers
                assert set(flag.names) <= said[path], path


def test_every_key_and_flag_is_documented() -> None:
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    missing = [path for path, _ in config_options() if f"`{path}`" not in page]
    missing += [word for word in dict(flags())["headrace serve"].split() if word.startswith("--") and f"`{word}`" not in page]
    assert not missing, f"docs/config.md does not name: {', '.join(missing)}"
