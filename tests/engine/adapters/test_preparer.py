"""Tests adapters in an engine with the fake runner, whose tokens say which weights answered: which requests wait, run, and are refused."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_kit import request
from patience import PATIENCE_S

from headrace.core import regular_files
from headrace.core.adapters import AdapterSource
from headrace.core.clock import Clock
from headrace.core.errors import CheckpointError, ConfigError, HeadraceError, InvalidRequest, Unavailable
from headrace.core.regular_files import FileThread
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.update import Rejected, SequenceUpdate
from headrace.engine.adapters import folders
from headrace.engine.adapters.preparer import AdapterPreparer, AdapterUse
from headrace.engine.build import assemble
from headrace.engine.config import EngineConfig
from headrace.lab.fake_adapters import FakeAdapter, FakeAdapterLoader, save_fake_adapter
from headrace.lab.fake_runner import FakeOptions, FakeRunner, fake_answer, fake_info

pytestmark = pytest.mark.socket

OPTIONS = FakeOptions(vocab_size=997, block_size=4, num_blocks=65)


class GatedLoader(FakeAdapterLoader):
    """Loads while its gate is open. loaded: each digest that was; now: a clock, at which a read takes two seconds

    hanging   names of folders whose file system does not answer until `answered` is set
    is_stuck  one thread waits there
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.inspected: list[str] = []
        self.loaded: list[str] = []
        self.now = 0.0
        self.hanging: set[str] = set()
        self.is_stuck: Future[None] = Future()
        self.answered = threading.Event()

    def hang(self, folder: Path) -> None:
        if folder.name in self.hanging:
            self.is_stuck.set_result(None)
            assert self.answered.wait(PATIENCE_S)

    def inspect(self, folder: Path) -> str:
        self.inspected.append(folder.name)
        self.hang(folder)
        return super().inspect(folder)

    def load(self, folder: Path, digest: str) -> FakeAdapter:
        assert self.gate.wait(PATIENCE_S)
        self.hang(folder)
        self.loaded.append(digest)
        self.now += 2.0
        return super().load(folder, digest)


class AdaptedEngine:
    """An engine turned by hand, with the adapters `a0` .. of a folder."""

    def __init__(
        self,
        folder: Path,
        num_adapters: int,
        *,
        loader: GatedLoader | None = None,
        clock: Clock = time.monotonic,
        max_cpu_loras: int | None = None,
        options: FakeOptions = OPTIONS,
        **config: Any,
    ) -> None:
        self.folder, self.loader = folder, loader or GatedLoader()
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.cached: dict[str, int] = {}
        self.open: set[tuple[str, int]] = set()
        self.cancelled: set[str] = set()
        self.requests: dict[str, EngineRequest] = {}
        self.errors: dict[str, Exception] = {}
        settings = EngineConfig(model="fake", enable_lora=True, **{"max_loras": 2, **config}).checked()
        self.adapters = AdapterPreparer(
            self.loader,
            max_loras=settings.max_loras,
            max_cpu_loras=max_cpu_loras or settings.max_loras,
            max_num_seqs=settings.max_num_seqs,
            clock=clock,
        )
        runner = FakeRunner(options, resident=self.adapters.resident)
        self.engine = assemble(settings, runner, fake_info(options), self._take, adapters=self.adapters)
        self.set(*[f"a{number}" for number in range(num_adapters)])

    def set(self, *names: str) -> None:
        """The adapters of these names alone. One that has no folder yet gets one."""
        for name in names:
            if not (self.folder / name).exists():
                save_fake_adapter(self.folder / name, name.encode())
        self.engine.set_adapters(sources(self.folder, *names))

    def _take(self, updates: list[SequenceUpdate | Rejected]) -> None:
        for update in updates:
            if isinstance(update, Rejected):
                self.errors[update.request_id] = update.error
                self.open = {key for key in self.open if key[0] != update.request_id}
                continue
            assert update.error is None, update.error
            self.tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
            if update.num_cached_tokens is not None:
                self.cached[update.request_id] = update.num_cached_tokens
            if update.finish is not None:
                self.open.discard((update.request_id, update.index))

    def submit(self, name: str, adapter: str | None, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> None:
        digest = self.engine.info.adapters.get(adapter, "ab") if adapter else ""
        asked = request(name, list(prompt), **{"adapter": adapter, "adapter_digest": digest, **changes})
        self.requests[name] = asked
        self.open |= {(name, index) for index in asked.indices}
        self.engine.submit(asked)

    def cancel(self, name: str) -> None:
        self.cancelled.add(name)
        self.engine.cancel(self.requests[name].request_id)

    def turn(self) -> None:
        if not self.engine.turn():
            self.engine.idle()

    def turn_until_first_token(self, name: str) -> None:
        """An adapter is read between two turns, so that the turns that it takes do not depend on the machine."""
        while not self.tokens.get((name, 0)):
            self.turn()
            while self.adapters._reading:
                time.sleep(0.001)

    def run(self, *, but: frozenset[str] = frozenset()) -> None:
        """Until all have ended but some; each answer is that of its adapter's weights."""
        while any(name not in but for name, _ in self.open):
            self.turn()
        for (name, index), tokens in self.tokens.items():
            if name not in but:
                asked = self.requests[name]
                answer = fake_answer(asked, index, asked.params.max_tokens or 0, OPTIONS)
                assert tokens == (answer[: len(tokens)] if name in self.cancelled else answer), name
        if not but:
            self.engine.turn()
            self.engine.scheduler.check()
            self.adapters.check()


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdaptedEngine]:
    """An engine with three adapters, whose loader may hang: the time of a read is over as soon as it does, and no sooner."""
    made = AdaptedEngine(tmp_path, 3)
    real_stamp = folders._stamp

    def wait_until_stuck(reads: Sequence[Future[object]], limit_s: float) -> Any:
        assert 0 < limit_s < 60.0
        waited: list[Future[Any]] = [*reads, made.loader.is_stuck]
        found = wait(waited, PATIENCE_S, FIRST_COMPLETED)
        if made.loader.is_stuck not in found.done:
            return found
        made.loader.is_stuck = Future()
        return wait([], 0)

    def stamp(folder: Path) -> folders.Stamp | None:
        made.loader.hang(folder)
        return real_stamp(folder)

    monkeypatch.setattr(regular_files, "wait", wait_until_stuck)
    monkeypatch.setattr(folders, "_stamp", stamp)
    yield made
    answer(made)
    made.run()


def left_behind() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, FileThread)]


def answer(made: AdaptedEngine) -> None:
    made.loader.hanging.clear()
    made.loader.answered.set()
    for thread in left_behind():
        thread.join(PATIENCE_S)


def sources(folder: Path, *names: str) -> list[AdapterSource]:
    return [AdapterSource(name=name, path=str(folder / name)) for name in names]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("max_cpu_loras", "num_blocks"), [(2, 65), (3, 20)])
def test_adapters_share_batches_with_each_other_and_the_base_model(tmp_path: Path, depth: int, max_cpu_loras: int, num_blocks: int) -> None:
    """Five adapters over two places; of few blocks, sequences are preempted and keep their place."""
    draw = random.Random(depth)
    options = replace(OPTIONS, num_blocks=num_blocks)
    made = AdaptedEngine(tmp_path, 5, options=options, depth=depth, max_cpu_loras=max_cpu_loras, max_num_seqs=6)
    for number in range(60):
        adapter = draw.choice([None, *made.engine.info.adapters])
        prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
        made.submit(f"r{number}", adapter, prompt, n=draw.choice([1, 1, 3]), tenant=draw.choice("xy"), max_tokens=draw.randrange(1, 20))
        if draw.random() < 0.2:
            made.cancel(f"r{number}")
        for _ in range(draw.randrange(3)):
            made.turn()
        assert made.adapters.reads_done.pool_bytes <= max_cpu_loras * made.loader.max_bytes
    made.run()
    assert not made.errors
    assert len(made.loader.loaded) >= 5
    assert made.adapters.use == AdapterUse()
    assert num_blocks == 65 or made.engine.snapshot().counters.preemptions > 0


def test_a_backlog_of_one_tenant_leaves_places_to_others(tmp_path: Path) -> None:
    made = AdaptedEngine(tmp_path, 3, max_num_seqs=4)
    for number in range(200):
        made.submit(f"busy {number}", f"a{number % 2}", tenant="busy", priority=PriorityClass.BATCH, max_tokens=4)
    for _ in range(20):
        made.turn()
    before = len({name for name, _ in made.open})
    made.submit("other", "a2", tenant="other", priority=PriorityClass.PREMIUM, max_tokens=4)
    while "a2" not in made.adapters.use.running:  # from then on it is read, on a thread of its own
        made.turn()
    assert before - len({name for name, _ in made.open}) <= 3 * 2 * 4, "it waited for the backlog"
    made.turn_until_first_token("other")
    made.run()
    assert not made.errors


def test_others_are_served_while_an_adapter_is_read_once_for_all_that_wait(tmp_path: Path) -> None:
    made = AdaptedEngine(tmp_path, 3)
    made.loader.gate.clear()
    for number in range(3):
        made.submit(f"waits {number}", "a0", n=2)
    made.submit("waits for a place", "a1")
    made.submit("waits for another", "a2")
    made.submit("base", None)
    made.run(but=frozenset({"waits 0", "waits 1", "waits 2", "waits for a place", "waits for another"}))
    load = made.engine.snapshot()
    assert (load.running_adapters, load.waiting_adapters, load.max_loras) == (("a0", "a1"), ("a2",), 2)
    made.loader.gate.set()
    made.run()
    assert len(made.loader.loaded) == 3
    assert not made.errors


def test_a_name_with_new_weights_meets_no_old_tokens_and_what_runs_keeps_its_own(tmp_path: Path) -> None:
    made = AdaptedEngine(tmp_path, 1)
    prompt = list(range(20))
    for name in ("first", "again"):
        made.submit(name, "a0", prompt)
        made.run()
    assert made.cached["again"] > 0
    made.submit("runs", "a0", prompt, max_tokens=40)
    made.turn_until_first_token("runs")
    before = made.engine.info.adapters["a0"]
    save_fake_adapter(tmp_path / "a0", b"other weights")
    made.set("a0")
    assert made.engine.info.adapters["a0"] != before
    made.submit("anew", "a0", prompt)
    made.submit("asks for the old weights", "a0", prompt, adapter_digest=before)
    made.run()
    assert made.cached["anew"] == 0
    assert made.tokens["anew", 0] != made.tokens["first", 0]
    assert isinstance(made.errors["asks for the old weights"], Unavailable)
    assert len(made.tokens["runs", 0]) == 40


def test_an_adapter_that_cannot_be_read_refuses_its_requests_alone(tmp_path: Path) -> None:
    made = AdaptedEngine(tmp_path, 2)
    shutil.move(tmp_path / "a0", tmp_path / "elsewhere")
    for number in range(2):
        made.submit(f"bad {number}", "a0", n=2)
    made.submit("good", "a1")
    made.run()
    assert set(made.errors) == {"bad 0", "bad 1"}
    assert isinstance(made.errors["bad 0"], Unavailable)
    assert str(made.errors["bad 0"]).startswith("the adapter cannot be used: cannot be read: No such file")
    assert str(tmp_path) not in str(made.errors["bad 0"]), "a client is told no paths of the server"
    shutil.move(tmp_path / "elsewhere", tmp_path / "a0")
    made.submit("good again", "a0")
    made.run()
    assert len(made.errors) == 2


def test_a_folder_that_does_not_answer_refuses_its_own_requests_alone(hanging: AdaptedEngine) -> None:
    hanging.loader.hanging = {"a0"}
    for number in range(2):
        hanging.submit(f"waits {number}", "a0")
    hanging.submit("behind it", "a1")
    hanging.submit("waits for a place", "a2")
    hanging.run()
    assert set(hanging.errors) == {"waits 0", "waits 1"}
    assert isinstance(hanging.errors["waits 0"], Unavailable)
    assert str(hanging.errors["waits 0"]).startswith("the adapter cannot be used: cannot be read (no answer within 50 s)")
    hanging.submit("later", "a0")
    hanging.submit("again", "a1")
    hanging.run()
    assert "an earlier read of its folder has no answer yet" in str(hanging.errors.pop("later"))
    assert len(left_behind()) == 1
    answer(hanging)
    hanging.submit("once it answers", "a0")
    hanging.run()
    assert set(hanging.errors) == {"waits 0", "waits 1"}


def test_while_many_folders_do_not_answer_no_more_threads_are_kept(hanging: AdaptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_UNANSWERED", 2)
    hanging.loader.hanging = {"a0", "a1"}
    for number in range(3):
        hanging.submit(f"r{number}", f"a{number}")
        hanging.run()
    assert set(hanging.errors) == {"r0", "r1", "r2"}
    assert "the folders of 2 other adapters do not answer" in str(hanging.errors["r2"])
    assert len(left_behind()) == 2
    answer(hanging)
    for number in range(3):
        hanging.submit(f"later {number}", f"a{number}")
    hanging.run()
    assert len(hanging.errors) == 3


def test_a_folder_that_does_not_answer_hinders_no_change_of_other_adapters(
    hanging: AdaptedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = hanging.engine.info.adapters
    hanging.loader.hanging = {"a0", "new"}
    save_fake_adapter(tmp_path / "a1", b"other weights")
    new = AdapterSource(name="new", path=str(save_fake_adapter(tmp_path / "new", b"new")))
    with pytest.raises(CheckpointError, match="new: cannot be read"):
        hanging.engine.set_adapters([*sources(tmp_path, "a0", "a1"), new])
    assert hanging.engine.info.adapters == before
    hanging.engine.set_adapters([*sources(tmp_path, "a0", "a1"), replace(new, is_optional=True)])
    assert set(hanging.engine.info.adapters) == {"a0", "a1"}
    assert hanging.engine.info.adapters["a0"] == before["a0"]
    assert hanging.engine.info.adapters["a1"] != before["a1"]
    assert "the folder of the adapter a0 cannot be read now (no answer within 5 s)" in caplog.text
    assert len(left_behind()) == 2
    answer(hanging)
    hanging.engine.set_adapters([*sources(tmp_path, "a0", "a1"), new])
    assert set(hanging.engine.info.adapters) == {"a0", "a1", "new"}


@pytest.mark.parametrize("what", ["a0", "a0/adapter_config.json", "a0/adapter_model.safetensors"])
@pytest.mark.parametrize("has_root", [True, False])
def test_what_leads_out_of_its_root_by_now_is_not_read(tmp_path: Path, what: str, has_root: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its bytes are the same: only where they are is not. An adapter of the configuration may be anywhere."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    made = AdaptedEngine(root, 2, max_loras=1)
    first, second = (replace(each, root=str(root) if has_root else None) for each in sources(root, "a0", "a1"))
    made.engine.set_adapters([first, second])
    for name in ("a0", "a1"):
        made.submit(f"before {name}", name)
        made.run()
    shutil.move(root / what, outside)
    (root / what).symlink_to(outside)
    made.submit("after", "a0")
    made.run()
    if not has_root:
        made.engine.set_adapters([first, second])
        assert not made.errors
        return
    assert isinstance(made.errors["after"], Unavailable)
    assert str(made.errors["after"]) == "the adapter cannot be used: its folder or a file of it is not below lora_root"
    before = made.engine.info.adapters
    with pytest.raises(CheckpointError, match=r"^the adapter a0 \(.*/root/a0\): its folder or a file of it is not below lora_root"):
        made.engine.set_adapters([first, second])
    assert made.engine.info.adapters == before
    made.engine.set_adapters([replace(first, is_optional=True), second])
    assert set(made.engine.info.adapters) == {"a1"}
    assert "the adapter a0 is left out" in caplog.text


def test_reads_and_the_bytes_of_the_pool_are_in_the_load(tmp_path: Path) -> None:
    loader = GatedLoader()
    made = AdaptedEngine(tmp_path, 3, loader=loader, clock=lambda: loader.now, max_loras=1, max_cpu_loras=2)
    shown = []
    for number, name in enumerate(("a0", "a1", "a0", "a2", "a1", "gone")):
        if name == "gone":
            shutil.rmtree(tmp_path / "a0")
            name = "a0"
        made.submit(f"r{number}", name)
        made.run()
        made.engine.turn()
        load = made.engine.snapshot()
        counters = load.counters
        shown.append(
            (
                (counters.adapter_reads, counters.adapter_read_microseconds, counters.adapter_reads_failed, counters.adapter_evictions),
                (load.adapter_pool_bytes, load.adapter_pool_highest_bytes),
            )
        )
    assert shown == [
        ((1, 2_000_000, 0, 0), (2, 2)),
        ((2, 4_000_000, 0, 0), (4, 4)),
        ((2, 4_000_000, 0, 0), (4, 4)),
        ((3, 6_000_000, 0, 1), (4, 4)),
        ((4, 8_000_000, 0, 2), (4, 4)),
        ((4, 8_000_000, 1, 3), (2, 4)),
    ]


def test_those_that_wait_for_an_adapter_that_is_taken_away_are_refused(tmp_path: Path) -> None:
    made = AdaptedEngine(tmp_path, 3, max_loras=1)
    made.submit("runs", "a0", max_tokens=60)
    made.turn_until_first_token("runs")
    made.loader.gate.clear()
    made.submit("waits", "a1")
    made.submit("is replaced", "a2")
    made.turn()
    save_fake_adapter(tmp_path / "a2", b"other weights")
    made.set("a2")
    made.submit("comes late", "a1")
    made.loader.gate.set()
    made.run()
    assert {name: type(error) for name, error in made.errors.items()} == dict.fromkeys(["waits", "is replaced", "comes late"], Unavailable)
    assert "the adapter a1 was loaded again or unloaded" in str(made.errors["waits"])
    assert len(made.tokens["runs", 0]) == 60


def test_a_request_that_needs_an_adapter_and_more_waits_for_both(tmp_path: Path) -> None:
    """Where another preparer refuses the request, its adapter's place is free again."""

    class Refusing:
        def begin(self, request: EngineRequest, preparation_id: int) -> dict[str, float]:
            raise InvalidRequest("grammar", "another one")

        def end(self, preparation_id: int) -> None: ...

        def close(self) -> None: ...

    made = AdaptedEngine(tmp_path, 2, max_loras=1)
    preparers = made.engine._preparations._preparer
    preparers._preparers.append(Refusing())  # type: ignore[attr-defined]
    made.submit("refused", "a0")
    made.run()
    assert isinstance(made.errors["refused"], InvalidRequest)
    preparers._preparers.pop()  # type: ignore[attr-defined]
    made.submit("served", "a1")
    made.run()


def test_adapters_are_set_all_or_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = AdaptedEngine(tmp_path, 2)
    before = made.engine.info.adapters
    save_fake_adapter(tmp_path / "a0", b"other weights")
    gone = AdapterSource(name="gone", path=str(tmp_path / "gone"))
    kept = sources(tmp_path, "a0", "a1")
    for wrong, error in (([*kept, gone], CheckpointError), ([*kept, kept[0]], ConfigError), ([replace(kept[0], name="a b")], ConfigError)):
        with pytest.raises(error):
            made.engine.set_adapters(wrong)
        assert made.engine.info.adapters == before
    made.engine.set_adapters([*kept, replace(gone, is_optional=True)])
    assert set(made.engine.info.adapters) == {"a0", "a1"}
    assert made.engine.info.adapters["a0"] != before["a0"]
    assert "the adapter gone is left out" in caplog.text


def test_files_that_have_not_changed_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = AdaptedEngine(tmp_path, 2)
    made.set("a0", "a1")
    assert made.loader.inspected == ["a0", "a1"] * 2, "they were written a moment ago"
    monkeypatch.setattr(folders, "SETTLED_NS", 0)
    made.set("a0", "a1")
    save_fake_adapter(tmp_path / "a1", b"other weights")
    made.set("a0", "a1")
    assert made.loader.inspected == [*["a0", "a1"] * 3, "a1"]


def test_only_the_folders_that_are_named_are_looked_at_again(tmp_path: Path) -> None:
    made = AdaptedEngine(tmp_path, 2)
    before = made.engine.info.adapters
    for name in ("a0", "a1", "elsewhere", "new"):
        save_fake_adapter(tmp_path / name, b"other weights")
    made.engine.set_adapters(sources(tmp_path, "a0", "a1", "new"), changed={"a1"})
    assert made.loader.inspected == ["a0", "a1", "a1", "new"]
    assert made.engine.info.adapters["a0"] == before["a0"]
    assert made.engine.info.adapters["a1"] == made.engine.info.adapters["new"] != before["a1"]
    made.engine.set_adapters([AdapterSource(name="a0", path=str(tmp_path / "elsewhere"))], changed=())
    assert made.engine.info.adapters["a0"] != before["a0"], "a known name with another folder is a new adapter"


def test_a_folder_that_is_gone_hinders_no_change_of_other_adapters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = AdaptedEngine(tmp_path, 2)
    before = made.engine.info.adapters
    shutil.rmtree(tmp_path / "a0")
    save_fake_adapter(tmp_path / "new", b"new")
    made.engine.set_adapters(sources(tmp_path, "a0", "new"))
    assert (made.engine.info.adapters["a0"], set(made.engine.info.adapters)) == (before["a0"], {"a0", "new"})
    assert "the folder of the adapter a0 cannot be read now" in caplog.text
    made.submit("r", "a0")
    made.submit("n", "new")
    made.run()
    assert isinstance(made.errors["r"], Unavailable), "nothing else is computed in its place"


def test_an_engine_without_adapters_takes_none(tmp_path: Path) -> None:
    engine = assemble(EngineConfig(model="fake").checked(), FakeRunner(OPTIONS), fake_info(OPTIONS), lambda updates: None)
    with pytest.raises(HeadraceError, match="lora_modules: this engine has no adapters"):
        engine.set_adapters(sources(tmp_path, "a0"))
    assert engine.snapshot().max_loras == 0
    assert engine.snapshot().adapter_pool_bytes is None
