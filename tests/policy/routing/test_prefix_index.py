"""Tests the prefix index against a plain one: what each replica was sent, least recently sent dropped first, and nothing across tenants."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.policy.routing.prefix_index import CHUNK_TOKENS, MAX_PROMPT_CHUNKS, PrefixIndex, prompt_chunks

pytestmark = pytest.mark.pure

REPLICAS = ("a", "b", "c", "d")
MAX_CHUNKS = 18

Path = tuple[int, ...]
"""A prompt in words of one chunk each."""

paths = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


def chunks_of(path: Path) -> list[int]:
    """An id for each beginning of it, the longest first."""
    return [hash(path[:length]) for length in range(len(path), 0, -1)]


class PlainIndex:
    """Keeps for each replica a list of the beginnings that it was sent, the one sent last at the end."""

    def __init__(self) -> None:
        self.sent: dict[str, tuple[str, list[Path]]] = {}

    def add(self, replica: str, instance: str, path: Path, room: int) -> None:
        before = self.sent.get(replica, ("", []))
        known = before[1] if before[0] == instance else []
        new = [path[:length] for length in range(min(room, len(path)), 0, -1)]
        known = [*[each for each in known if each not in new], *new]
        self.sent[replica] = instance, known[max(0, len(known) - room) :]

    def num_known(self, replica: str, instance: str, path: Path) -> int:
        known_instance, known = self.sent.get(replica, ("", []))
        return 0 if known_instance != instance else sum(path[: length + 1] in known for length in range(len(path)))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index, self.plain = PrefixIndex[str](MAX_CHUNKS), PlainIndex()
        self.instances = dict.fromkeys(REPLICAS, 0)

    @rule(replica=st.sampled_from(REPLICAS), path=paths, num_chunks=st.integers(0, 12))
    def send(self, replica: str, path: Path, num_chunks: int) -> None:
        instance = str(self.instances[replica])
        self.index.add(replica, instance, chunks_of(path), kv_tokens=num_chunks * CHUNK_TOKENS + 5)
        num_replicas = len({*self.plain.sent, replica})
        self.plain.add(replica, instance, path, min(num_chunks, MAX_CHUNKS // num_replicas))

    @rule(replica=st.sampled_from(REPLICAS))
    def restart(self, replica: str) -> None:
        self.instances[replica] += 1

    @rule(replica=st.sampled_from(REPLICAS))
    def retire(self, replica: str) -> None:
        self.index.forget(replica)
        self.plain.sent.pop(replica, None)

    @rule(path=paths)
    def look(self, path: Path) -> None:
        for replica, instance in self.instances.items():
            expected = self.plain.num_known(replica, str(instance), path)
            assert self.index.tokens(replica, str(instance), chunks_of(path)) == expected * CHUNK_TOKENS
        lengths = {replica: self.plain.num_known(replica, known[0], path) for replica, known in self.plain.sent.items()}
        most = max(lengths.values(), default=0)
        found, first_new = self.index.find(chunks_of(path))
        assert set(found) == {replica for replica, length in lengths.items() if most and length == most}
        assert first_new == (None if most == len(path) or len(found) == 1 else hash(path[: most + 1]))

    @invariant()
    def check(self) -> None:
        self.index.check()


def test_the_first_new_chunk_of_a_conversation_is_the_same_where_its_beginning_is_known() -> None:
    """One gateway sent the system prompt alone, the other one the first turn too."""
    system, first, second = (0, 0), (0, 0, 1), (0, 0, 1, 0, 1)
    here, there = PrefixIndex[str](), PrefixIndex[str]()
    for index in (here, there):
        for replica in ("a", "b"):
            index.add(replica, "0", chunks_of(system), kv_tokens=10_000)
    of_first = here.find(chunks_of(first))[1]
    here.add("b", "0", chunks_of(first), kv_tokens=10_000)
    assert there.find(chunks_of(second))[1] == of_first == hash(first)
    assert here.find(chunks_of(second)) == (["b"], None)


TestPrefixIndex = IndexMachine.TestCase


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple([draw.randrange(150_000) for _ in range(num_tokens)])


def test_equal_beginnings_have_equal_chunks_up_to_the_first_other_token() -> None:
    whole = prompt(1000)
    other = (*whole[:300], whole[300] + 1, *whole[301:])
    mine, its = (prompt_chunks(ids, salt=b"s", adapter_digest="")[::-1] for ids in (whole, other))
    assert len(mine) == len(its) == 1000 // CHUNK_TOKENS == len(set(mine))
    assert [one == another for one, another in zip(mine, its, strict=True)] == [True] * (300 // CHUNK_TOKENS) + [False] * 5
    assert mine == prompt_chunks(whole + prompt(50), salt=b"s", adapter_digest="")[:-8:-1]


def test_tenants_and_adapters_share_no_chunk() -> None:
    of = [set(prompt_chunks(prompt(900), salt=salt, adapter_digest=digest)) for salt in (b"", b"a", b"b") for digest in ("", "aa", "bb")]
    assert len(set.union(*of)) == sum(map(len, of)) == 9 * 7


def test_of_a_long_prompt_the_beginning_is_known() -> None:
    assert len(prompt_chunks((1,) * (CHUNK_TOKENS * MAX_PROMPT_CHUNKS + 500), salt=b"", adapter_digest="")) == MAX_PROMPT_CHUNKS
