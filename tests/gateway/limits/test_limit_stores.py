"""Tests that each store of limits does what the pure book does, step by step, and survives what happens to its server or file."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import msgspec
import pytest
from dict_rows import DictRows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_kit import RedisServer

from headrace.gateway.limits.redis import RedisLimits
from headrace.gateway.limits.sqlite import SqliteLimits
from headrace.gateway.limits.store import LimitStore
from headrace.gateway.stores.redis import open_redis
from headrace.gateway.stores.sqlite_thread import IN_MEMORY
from headrace.gateway.stores.store import StoreFailed
from headrace.policy.limits.book import NO_CHARGES, Charges, Claim, Holder, LimitBook
from headrace.policy.limits.counters import DAY_MS, Amounts, Moment, Unit, Window

pytestmark = pytest.mark.socket

NOON = 20_000 * DAY_MS + DAY_MS // 2
LARGE = 4_000_000_000_000_000
"""Nano-units: beyond what a script would write without an exponent."""

CLAIMS = (
    ("t:acme/requests_per_minute", Window.MINUTE, Unit.REQUESTS, 5),
    ("t:acme/max_concurrent_requests", Window.OPEN, Unit.OPEN, 3),
    ("t:acme/daily_tokens", Window.DAY, Unit.TOKENS, 100),
    ("t:acme/monthly_budget", Window.MONTH, Unit.NANOS, 2 * LARGE),
    ('u:acme:"so, an odd {name}" \u00e9', Window.MINUTE, Unit.REQUESTS, 2),
)


@dataclass
class Act:
    """One call, on the store or on the book. ended: request that a `take` charges on its way"""

    kind: str
    number: int
    gateway: str
    amounts: tuple[int, ...]
    ms: int
    ended: int | None


ACTS = st.lists(
    st.builds(
        Act,
        st.sampled_from(["take", "take", "take", "charge", "renew", "expire", "wait", "jump"]),
        st.integers(0, 7),
        st.sampled_from("ab"),
        st.tuples(*(st.sampled_from([None, 0, 1, 2, 40, LARGE]) for _ in CLAIMS)),
        st.integers(0, 90_000),
        st.none() | st.integers(0, 6),
    ),
    max_size=30,
)


class Twin:
    """The book, and the times that a store is given."""

    def __init__(self) -> None:
        self.rows = DictRows()
        self.book = LimitBook(self.rows)
        self.now = Moment(7_000_123, NOON)
        self.beat = 0

    def clock(self) -> float:
        """In the middle of its millisecond: what the store cuts off must not be one that a float of seconds falls short of."""
        return (self.now.steady_ms + 0.5) / 1000

    def unix_time(self) -> float:
        return (self.now.unix_ms + 0.5) / 1000


async def both(act: Act, twin: Twin, store: LimitStore) -> tuple[object, object]:
    """What the book and the store answer to one act."""
    name, saved = f"r{act.number}", Amounts(1, 0, 1, 2, 3, LARGE)
    if act.kind == "take":
        claims = [Claim(*one, amount) for one, amount in zip(CLAIMS, act.amounts, strict=True)]
        holder = None if act.number == 7 else Holder(id=f"{act.gateway}{name}", gateway=act.gateway, beat=twin.beat, saved=saved)
        charges = NO_CHARGES if act.ended is None else Charges(act.gateway, {f"{act.gateway}r{act.ended}": Amounts(1, 0, 4, 4, 8, 3)})
        return twin.book.take(holder, claims, twin.now, charges), await store.take(holder, claims, charges)
    twin.beat += 3
    if act.kind == "charge":
        used = Amounts(1, 0, 5, 5, 10, 17)
        twin.book.charge(f"{act.gateway}{name}", used)
        await store.charge(Charges(act.gateway, {f"{act.gateway}{name}": used}))
        return None, None
    if act.kind == "renew":
        named = {f"{act.gateway}{name}": Amounts(1, 0, 9, 9, 18, LARGE + 1)}
        return twin.book.renew(act.gateway, twin.beat, named, twin.now), await store.renew(act.gateway, twin.beat, named)
    beat = twin.rows.gateways.get(act.gateway, -1) - (act.number == 0)
    return twin.book.expire(act.gateway, beat, twin.now), await store.expire(act.gateway, beat)


async def compare(acts: list[Act], twin: Twin, store: LimitStore, set_now: Callable[[Moment], None]) -> None:
    for act in acts:
        if act.kind in ("wait", "jump"):
            steady_ms = twin.now.steady_ms + act.ms * (60 if act.number == 0 else 1)
            jump_ms = (act.number - 3) * 365 * DAY_MS // 4 if act.kind == "jump" else 0
            twin.now = Moment(steady_ms, twin.now.unix_ms + act.ms + jump_ms)
            set_now(twin.now)
            continue
        expected, found = await both(act, twin, store)
        assert found == expected, act
    reads = [Claim(*one, None) for one in CLAIMS]
    assert await store.take(None, reads) == twin.book.take(None, reads, twin.now)


@given(ACTS)
@settings(max_examples=40, deadline=None)
def test_the_sqlite_store_does_what_the_book_does(acts: list[Act]) -> None:
    async def run() -> None:
        twin = Twin()
        store = SqliteLimits(IN_MEMORY, clock=twin.clock, unix_time=twin.unix_time)
        try:
            await compare(acts, twin, store, lambda _: None)
        finally:
            await store.close()

    asyncio.run(run())


class AnyOfBoth:
    """Two processes' stores of one file: each call goes to the one that `places` says next."""

    def __init__(self, stores: Sequence[LimitStore], places: Iterator[int]) -> None:
        self._stores, self._places = stores, places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stores[next(self._places)], name)


@given(ACTS, st.lists(st.integers(0, 1), min_size=1))
@settings(max_examples=25, deadline=None)
def test_two_processes_on_one_file_do_together_what_the_book_does(acts: list[Act], places: list[int]) -> None:
    async def run(folder: str) -> None:
        twin = Twin()
        stores = [SqliteLimits(f"{folder}/limits.db", clock=twin.clock, unix_time=twin.unix_time) for _ in range(2)]
        try:
            await compare(acts, twin, cast("LimitStore", AnyOfBoth(stores, cycle(places))), lambda _: None)
        finally:
            for store in stores:
                await store.close()

    with TemporaryDirectory() as folder:
        asyncio.run(run(folder))


@given(ACTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_redis_store_does_what_the_book_does(redis_server: RedisServer, acts: list[Act]) -> None:
    async def run() -> None:
        twin = Twin()
        store = RedisLimits(open_redis(redis_server.url))
        await store._client.flushall()

        def set_now(now: Moment) -> None:
            store.now = now

        set_now(twin.now)
        try:
            await compare(acts, twin, store, set_now)
        finally:
            await store.close()

    asyncio.run(run())


TOKENS = Claim("t:acme/daily_tokens", Window.DAY, Unit.TOKENS, 100, 30)
Open = Callable[[], LimitStore]
EARLIER = (
    "CREATE TABLE used (counter TEXT NOT NULL, bucket INTEGER NOT NULL, window TEXT NOT NULL, used INTEGER NOT NULL,"
    " PRIMARY KEY (counter, bucket)) WITHOUT ROWID",
    "CREATE INDEX used_by_minute ON used (bucket) WHERE window = 'minute'",
    "CREATE TABLE reservations (id TEXT PRIMARY KEY, gateway TEXT NOT NULL, beat INTEGER NOT NULL,"
    " saved BLOB NOT NULL, taken BLOB NOT NULL, expired_ms INTEGER)",
    "CREATE INDEX reservations_by_gateway ON reservations (gateway, beat)",
    "CREATE INDEX reservations_by_expiry ON reservations (expired_ms) WHERE expired_ms IS NOT NULL",
    "CREATE TABLE gateways (gateway TEXT PRIMARY KEY, beat INTEGER NOT NULL)",
    "PRAGMA user_version = 1",
)
"""Makes the file as programs did that had more indexes."""


@pytest.fixture(params=["file", "redis"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    """Opens the same store again and again, as several processes do. Each waits for the others longer than a busy machine holds them up."""
    monkeypatch.setattr("headrace.gateway.stores.sqlite_thread.BUSY_MS", 20_000)
    opened: list[LimitStore] = []
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    twin = Twin()

    def one_more() -> LimitStore:
        path = str(tmp_path / "limits.db")
        store = RedisLimits(open_redis(url)) if url else SqliteLimits(path, clock=twin.clock, unix_time=twin.unix_time)
        opened.append(store)
        return store

    yield one_more
    await asyncio.gather(*(store.close() for store in opened))


def holder(name: str, gateway: str) -> Holder:
    return Holder(id=name, gateway=gateway, beat=0, saved=Amounts(tokens=5))


async def gathered(*calls: Awaitable[object]) -> list[object]:
    return list(await asyncio.gather(*calls))


async def test_two_processes_never_both_take_what_is_left(open_store: Open) -> None:
    stores = [open_store(), open_store()]
    takes = [stores[number % 2].take(holder(f"r{number}", "ab"[number % 2]), [TOKENS]) for number in range(20)]
    results = await asyncio.gather(*takes)
    assert sum(result.is_admitted for result in results) == 3


async def test_of_many_survivors_one_charges_a_dead_gateways_requests(open_store: Open) -> None:
    first, *survivors = [open_store() for _ in range(5)]
    await first.take(holder("r1", "dead"), [TOKENS])
    counts = await gathered(*(store.expire("dead", 0) for store in survivors))
    assert sorted(map(str, counts)) == ["0", "0", "0", "1"]
    assert [reading.current for reading in (await first.take(None, [TOKENS._replace(amount=None)])).readings] == [5]
    await first.charge(Charges("dead", {"r1": Amounts(tokens=12)}))
    assert [reading.current for reading in (await first.take(None, [TOKENS._replace(amount=None)])).readings] == [12]


async def test_a_book_is_read_again_by_the_next_process(open_store: Open) -> None:
    first = open_store()
    await first.take(holder("r1", "a"), [TOKENS])
    await first.renew("a", 4, {"r1": Amounts(tokens=20)})
    await first.close()
    assert await open_store().renew("b", 1, {}) == {"a": 4, "b": 1}
    assert await open_store().expire("a", 4) == 1


async def test_a_transaction_writes_one_page_of_counters_and_one_of_reservations(tmp_path: Path) -> None:
    """With two indexes and an order of their own, reservations had four pages in each transaction."""
    twin = Twin()
    store = SqliteLimits(str(tmp_path / "limits.db"), clock=twin.clock, unix_time=twin.unix_time)
    log = tmp_path / "limits.db-wal"
    try:
        for number in range(3):
            before = log.stat().st_size
            await store.take(holder(f"r{number}", "a"), [TOKENS], Charges("a", {f"r{number - 1}": Amounts(tokens=1)}))
        assert log.stat().st_size - before <= 2 * (4096 + 24)
    finally:
        await store.close()


async def test_a_file_of_an_earlier_program_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "limits.db"
    earlier = sqlite3.connect(path, isolation_level=None)
    for statement in EARLIER:
        earlier.execute(statement)
    earlier.execute("INSERT INTO gateways VALUES ('a', 4)")
    taken = msgspec.msgpack.encode((("t:acme/daily_tokens", NOON // DAY_MS, Unit.TOKENS, 30),))
    earlier.execute("INSERT INTO reservations VALUES ('r1', 'a', 1, ?, ?, NULL)", (msgspec.msgpack.encode((1, 0, 0, 0, 7, 0)), taken))
    earlier.execute("INSERT INTO used VALUES ('t:acme/daily_tokens', ?, 'day', 30)", (NOON // DAY_MS,))
    earlier.close()
    twin = Twin()
    store = SqliteLimits(str(path), clock=twin.clock, unix_time=twin.unix_time)
    try:
        assert (await store.take(holder("r2", "b"), [TOKENS])).readings[0].current == 30
        assert await store.expire("a", 4) == 1
        assert [reading.current for reading in (await store.take(None, [TOKENS._replace(amount=None)])).readings] == [37]
    finally:
        await store.close()


async def test_what_a_failed_transaction_took_is_not_counted(tmp_path: Path) -> None:
    twin = Twin()
    store = SqliteLimits(str(tmp_path / "limits.db"), clock=twin.clock, unix_time=twin.unix_time)
    try:
        await store.take(holder("r1", "a"), [TOKENS])
        other = sqlite3.connect(tmp_path / "limits.db", isolation_level=None)
        other.execute("CREATE TRIGGER full BEFORE INSERT ON reservations BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        with pytest.raises(StoreFailed, match="disk full"):
            await store.take(holder("r2", "a"), [TOKENS])
        other.execute("DROP TRIGGER full")
        other.close()
        assert [reading.current for reading in (await store.take(holder("r3", "a"), [TOKENS])).readings] == [30]
        await store.charge(Charges("a", {"r2": Amounts(tokens=99), "r3": Amounts(tokens=1)}))
        assert [reading.current for reading in (await store.take(None, [TOKENS._replace(amount=None)])).readings] == [31]
    finally:
        await store.close()


async def test_a_request_of_a_known_client_costs_few_statements(tmp_path: Path) -> None:
    """Each statement waits for the interpreter's lock. A process that is alone with its file reads nothing again."""
    twin, statements = Twin(), list[str]()
    store = SqliteLimits(str(tmp_path / "limits.db"), clock=twin.clock, unix_time=twin.unix_time)
    try:
        await store.renew("a", 1, {})
        await store.take(holder("r1", "a"), [TOKENS])
        store._thread.connection.set_trace_callback(statements.append)
        await store.take(holder("r2", "a"), [TOKENS])
        await store.charge(Charges("a", {"r2": Amounts(tokens=3)}))
        await store.take(holder("r3", "a"), [TOKENS], Charges("a", {"r1": Amounts(tokens=3)}))
        store._thread.connection.set_trace_callback(None)
    finally:
        await store.close()
    assert [statement.split()[0] for statement in statements] == [
        *("BEGIN", "PRAGMA", "INSERT", "INSERT", "COMMIT"),
        *("BEGIN", "PRAGMA", "INSERT", "DELETE", "COMMIT"),
        *("BEGIN", "PRAGMA", "INSERT", "INSERT", "DELETE", "COMMIT"),
    ]


USED = TOKENS._replace(amount=None)


async def test_a_take_finds_what_its_own_charges_give_back(open_store: Open) -> None:
    store = open_store()
    for name in ("r1", "r2", "r3"):
        assert (await store.take(holder(name, "a"), [TOKENS])).is_admitted
    ended = Charges("a", {"r1": Amounts(tokens=10), "r2": Amounts(tokens=5)})
    taken = await store.take(holder("r4", "a"), [TOKENS], ended)
    assert (taken.is_admitted, taken.readings[0].current) == (True, 45)
    assert [reading.current for reading in (await store.take(None, [USED], ended)).readings] == [75], "twice is once"


async def test_a_take_that_is_refused_charges_all_the_same(open_store: Open) -> None:
    store = open_store()
    for name in ("r1", "r2", "r3"):
        await store.take(holder(name, "a"), [TOKENS])
    refused = await store.take(holder("r4", "a"), [TOKENS], Charges("a", {"r1": Amounts(tokens=29)}))
    assert not refused.is_admitted
    assert [reading.current for reading in (await store.take(None, [USED])).readings] == [89]


async def test_a_call_finds_charged_what_a_failed_one_was_given(tmp_path: Path) -> None:
    twin = Twin()
    store = SqliteLimits(str(tmp_path / "limits.db"), clock=twin.clock, unix_time=twin.unix_time)
    try:
        for name in ("r1", "r2", "r3"):
            await store.take(holder(name, "a"), [TOKENS])
        other = sqlite3.connect(tmp_path / "limits.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # no transaction of the store can begin
        with pytest.raises(StoreFailed, match="locked"):
            await store.take(None, [USED], Charges("a", {"r1": Amounts(tokens=1)}))
        other.execute("COMMIT")
        other.execute("CREATE TRIGGER full BEFORE INSERT ON reservations BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        with pytest.raises(StoreFailed, match="disk full"):
            await store.take(holder("r4", "a"), [TOKENS], Charges("a", {"r2": Amounts(tokens=2)}))
        other.execute("DROP TRIGGER full")
        other.close()
        assert [reading.current for reading in (await store.take(None, [USED])).readings] == [33]
        assert [reading.current for reading in (await store.take(None, [USED])).readings] == [33]
    finally:
        await store.close()


async def test_a_call_finds_charged_what_one_was_given_whose_caller_has_gone(tmp_path: Path) -> None:
    twin = Twin()
    store = SqliteLimits(str(tmp_path / "limits.db"), clock=twin.clock, unix_time=twin.unix_time)
    try:
        await store.take(holder("r1", "a"), [TOKENS])
        go_on = threading.Event()
        held = asyncio.create_task(store._thread.call(lambda: go_on.wait(10)))
        gone = asyncio.create_task(store.take(holder("r2", "a"), [TOKENS], Charges("a", {"r1": Amounts(tokens=1)})))
        after = asyncio.create_task(store.take(None, [USED]))
        await asyncio.sleep(0)
        gone.cancel()
        go_on.set()
        await held
        assert [reading.current for reading in (await after).readings] == [1], "charged, and nothing taken for nobody"
    finally:
        await store.close()


@pytest.mark.parametrize("statement", ["INTO used", "INTO reservations", "DELETE", "COMMIT"])
async def test_a_process_that_dies_within_a_take_has_done_all_of_it_or_nothing(tmp_path: Path, statement: str) -> None:
    """The charges and the amounts of one call are one transaction.

    What a process leaves that dies before a statement are the files as they are then; what it has in memory is lost.
    """
    claim = Claim("tokens", Window.OPEN, Unit.TOKENS, 100, 30)
    living, left = tmp_path / "living", tmp_path / "left"
    living.mkdir()

    def die(begun: str) -> None:
        if statement in begun:
            shutil.copytree(living, left, ignore=shutil.ignore_patterns("*-shm"))

    store = SqliteLimits(str(living / "limits.db"), clock=lambda: 1.0, unix_time=lambda: 1.0)
    await store.take(Holder(id="r1", gateway="a", beat=0, saved=Amounts()), [claim])
    store._thread.connection.set_trace_callback(die)
    charges = Charges("a", {"r1": Amounts(tokens=1)})
    await store.take(Holder(id="r2", gateway="a", beat=0, saved=Amounts()), [claim], charges)
    store._thread.connection.set_trace_callback(None)
    await store.close()
    store = SqliteLimits(str(left / "limits.db"), clock=lambda: 1.0, unix_time=lambda: 1.0)
    used = claim._replace(amount=None)
    assert [reading.current for reading in (await store.take(None, [used])).readings] == [30], statement
    charges = Charges("a", {"r1": Amounts(tokens=1), "r2": Amounts(tokens=2)})
    assert [reading.current for reading in (await store.take(None, [used], charges)).readings] == [1]
    await store.close()
