"""Tests sequences that share blocks, and a model that has no KV at all."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from engine_kit import FULL, VOCAB, DrivenEngine, request
from kv_oracle import expected_tokens

from headrace.core.ids import SeqId
from headrace.engine.build import make_scheduler
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, fake_info
from headrace.policy.kvcache.manager import KvManager
from headrace.policy.sequence import Sequence

pytestmark = pytest.mark.pure

PLAIN: dict[str, Any] = {"key": b"k", "model_digest": b"m", "kv_dtype": "bfloat16"}


def root_of(kv: KvManager, **changes: Any) -> bytes:
    """The identity under which a new sequence's blocks would be known."""
    asked = request("r", [1, 2, 3], **changes)
    seq = Sequence(SeqId(1), asked, 0, 0.0, array("i", asked.prompt_ids), 3, 8)
    kv.open(seq)
    return seq.root


def manager(**changes: Any) -> KvManager:
    return KvManager((FULL,), (8,), 4, **{**PLAIN, **changes})


@pytest.mark.parametrize("change", [{"key": b"j"}, {"model_digest": b"n"}, {"kv_dtype": "int8"}])
def test_key_model_and_kv_dtype_each_separate_blocks(change: dict[str, Any]) -> None:
    assert root_of(manager()) == root_of(manager())
    assert root_of(manager(**change)) != root_of(manager())


def test_an_adapter_is_known_by_its_content_not_by_its_name() -> None:
    named = [(None, ""), ("a", "01"), ("b", "02"), ("same", "01"), ("a", "09")]
    base, first, other, same, anew = [root_of(manager(), adapter=name, adapter_digest=digest) for name, digest in named]
    assert len({base, first, other, anew}) == 4, "also where the name was loaded anew"
    assert same == first


def test_the_engine_gives_its_model_and_kv_dtype_to_the_blocks() -> None:
    roots = []
    for digests in ({}, {"model": "ab"}, {"kv_dtype": "int8"}):
        info = fake_info(FakeOptions(digests=digests))
        roots.append(root_of(make_scheduler(EngineConfig(model="fake").checked(), info, block_key="6b").kv))
    assert len(set(roots)) == 3


def test_engines_that_share_the_key_name_their_blocks_alike() -> None:
    def root(block_key: str) -> bytes:
        return root_of(make_scheduler(EngineConfig(model="fake").checked(), fake_info(FakeOptions()), block_key=block_key).kv)

    assert root("6b") == root("6b") != root("6c")
    assert root("") != root(""), "without one each process draws its own"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_model_without_kv_groups_is_scheduled(depth: int, chunked: bool) -> None:
    """An encoder: no pool, no block, no hit; forks and preempted sequences compute their prompts themselves."""
    driven = DrivenEngine(groups=(), depth=depth, enable_chunked_prefill=chunked, max_num_batched_tokens=8)
    prompts = {"a": list(range(13)), "b": [5], "c": list(range(13))}
    driven.submit(*(request(name, prompt, n=2 if name == "a" else 1) for name, prompt in prompts.items()))
    driven.turn(3)
    driven.scheduler.sequences.preempt(driven.scheduler.sequences.slots.running[0], driven.clock.now)
    driven.run()
    for (name, index), tokens in driven.tokens.items():
        assert tokens == expected_tokens(prompts[name], 8, VOCAB, index)
    assert len(driven.tokens) == 4
    assert {u.num_cached_tokens for u in driven.updates if u.num_cached_tokens is not None} == {0}
    snapshot = driven.engine.snapshot()
    assert (snapshot.kv_blocks_total, snapshot.kv_blocks_used) == (0, 0)
