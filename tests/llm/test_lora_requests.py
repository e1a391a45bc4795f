"""Tests adapters of `LLM`: which folders are read when, which answers they give, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, LoRARequest, SamplingParams
from headrace.core.adapters import MAX_ADAPTERS
from headrace.core.errors import CheckpointError, ConfigError, InvalidRequest
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.engine.config import EngineConfig
from headrace.lab.fake_adapters import FakeAdapterLoader, save_fake_adapter
from headrace.lab.fake_runner import FakeOptions, fake_answer, fake_engine
from headrace.llm.adapters import folders_to_read
from headrace.llm.outputs import RequestOutput
from headrace.text.folder import TextModel

pytestmark = pytest.mark.pure

A, B = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b")
AGAIN, MOVED = LoRARequest("a", 1, "/a", load_inplace=True), LoRARequest("a", 1, "/moved", load_inplace=True)


def test_a_request_has_vllms_order_and_names() -> None:
    assert LoRARequest("a", 1, "/a", "base") == LoRARequest(lora_name="a", lora_int_id=1, lora_path="/a", base_model_name="base")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": 5}, "lora_name"),
        ({"lora_path": " "}, "lora_path"),
        ({"lora_int_id": 0}, "lora_int_id"),
        ({"lora_int_id": True}, "lora_int_id"),
        ({"tensorizer_config_dict": {}}, "tensorizer_config_dict"),
        ({"load_inplace": 1}, "load_inplace"),
    ],
)
def test_a_request_with_a_wrong_value_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "/a", **changes})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("known", "asked", "read"),
    [
        ([], [A, B, A], [A, B]),
        ([A, B], [B, A], []),
        ([A], [B], [B]),
        ([A, B], [AGAIN], [AGAIN]),
        ([AGAIN], [A], []),
        ([AGAIN], [AGAIN], [AGAIN]),
        ([A], [MOVED, MOVED], [MOVED]),
        ([MOVED], [LoRARequest("a", 1, "/moved")], []),
    ],
)
def test_folders_are_read_at_first_use_and_when_it_is_asked_for(
    known: list[LoRARequest], asked: list[LoRARequest], read: list[LoRARequest]
) -> None:
    assert folders_to_read({one.lora_name: one for one in known}, asked) == {one.lora_name: one for one in read}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ([LoRARequest("a", 1, "/moved")], r"'/a' with the id 1 for 'a', as when it was read, got .*/moved.*load_inplace=True"),
        ([LoRARequest("a", 2, "/a")], "with the id 2"),
        ([LoRARequest("c", 1, "/c")], "'a' has it"),
        ([A, AGAIN], "one LoRARequest per lora_name"),
    ],
)
def test_what_vllm_would_answer_with_other_weights_is_refused(asked: list[LoRARequest], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        folders_to_read({"a": A}, asked)


def test_a_name_beyond_the_most_that_an_engine_takes_is_refused() -> None:
    known = {str(number): LoRARequest(str(number), number, f"/{number}") for number in range(1, MAX_ADAPTERS + 1)}
    again = LoRARequest("7", 7, "/other", load_inplace=True)
    assert folders_to_read(known, [again]) == {"7": again}
    with pytest.raises(InvalidRequest, match=r"at most 4096 lora_names in the life of an LLM, got 4097.*load_inplace=True"):
        folders_to_read(known, [LoRARequest("more", MAX_ADAPTERS + 1, "/more")])


PARAMS = SamplingParams(seed=7, max_tokens=6)


@pytest.fixture
def options(text: TextModel) -> FakeOptions:
    return FakeOptions(vocab_size=text.tokenizer.vocab_size, max_model_len=256)


@pytest.fixture
def llm(text: TextModel, options: FakeOptions) -> Iterator[LLM]:
    """Two adapters at a time, over an engine that checks that no block of one adapter is read with another."""
    config = EngineConfig(model="fake", enable_lora=True, max_loras=2, block_size=4)
    with LLM.over(lambda config, outbox: fake_engine(outbox, options, config), text, config=config) as llm:
        yield llm
        assert llm.engine.snapshot().running_adapters == ()


@pytest.fixture
def adapters(tmp_path: Path) -> list[LoRARequest]:
    folders = [save_fake_adapter(tmp_path / name, name.encode()) for name in "abcd"]
    return [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1)]


def expected(output: RequestOutput, options: FakeOptions, folder: str | None) -> list[int]:
    digest = "" if folder is None else FakeAdapterLoader().inspect(Path(folder))
    request = EngineRequest(request_id=RequestId("x"), prompt_ids=tuple(output.prompt_token_ids), params=PARAMS, adapter_digest=digest)
    return fake_answer(request, 0, 6, options)


@pytest.mark.socket
def test_each_prompt_is_answered_with_its_own_adapter(llm: LLM, options: FakeOptions, adapters: list[LoRARequest]) -> None:
    asked = [*adapters, None, *adapters]
    outputs = llm.generate(["The same prompt"] * 9, PARAMS, lora_request=asked)
    outputs += llm.chat([{"role": "user", "content": "Hi"}], PARAMS, lora_request=adapters[0])
    for output, one in zip(outputs, [*asked, adapters[0]], strict=True):
        assert output.lora_request is one
        assert output.outputs[0].token_ids == expected(output, options, one.lora_path if one else None)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs[:9]}) == 5


@pytest.mark.socket
def test_a_folder_that_changed_is_read_when_it_is_asked_for(llm: LLM, options: FakeOptions, adapters: list[LoRARequest]) -> None:
    one, path = adapters[0], Path(adapters[0].lora_path)
    before = llm.generate("Hello", PARAMS, lora_request=one)[0].outputs[0].token_ids
    save_fake_adapter(path, b"other weights")
    assert llm.generate("Hello", PARAMS, lora_request=one)[0].outputs[0].token_ids == before
    again = LoRARequest(one.lora_name, one.lora_int_id, one.lora_path, load_inplace=True)
    for asked in (again, one):
        (output,) = llm.generate("Hello", PARAMS, lora_request=asked)
        assert output.outputs[0].token_ids == expected(output, options, one.lora_path) != before


@pytest.mark.socket
def test_a_new_adapter_costs_its_own_read_alone(
    llm: LLM, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Folders read before are not looked at: one that has been moved away refuses no other adapter."""
    inspected, inspect = [], FakeAdapterLoader.inspect

    def noted(loader: FakeAdapterLoader, folder: Path) -> str:
        inspected.append(folder.name)
        return inspect(loader, folder)

    gone, *others = adapters
    llm.generate("Hello", PARAMS, lora_request=gone)
    Path(gone.lora_path).rename(tmp_path / "elsewhere")
    monkeypatch.setattr(FakeAdapterLoader, "inspect", noted)
    for one in others:
        llm.generate("Hello", PARAMS, lora_request=one)
    assert inspected == ["b", "b", "c", "c", "d", "d"], "each is inspected, and read"
    assert set(llm.engine.info.adapters) == set("abcd")


@pytest.mark.socket
def test_what_cannot_be_used_is_refused_and_changes_nothing(llm: LLM, adapters: list[LoRARequest], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, error in (("nothing-there", ConfigError), (str(tmp_path / "empty"), CheckpointError)):
        with pytest.raises(error, match=path):
            llm.generate("Hello", PARAMS, lora_request=LoRARequest("a", 1, path))
    wrong: list[Any] = ["a", [adapters[0], adapters[1]], ["a"], 5]
    for given in wrong:
        with pytest.raises(InvalidRequest) as caught:
            llm.generate("Hello", PARAMS, lora_request=given)
        assert caught.value.field == "lora_request"
    llm.generate("Hello", PARAMS, lora_request=adapters[0])


def test_without_enable_lora_the_keyword_is_named(text: TextModel, options: FakeOptions) -> None:
    with (
        LLM.over(lambda config, outbox: fake_engine(outbox, options, config), text, config=EngineConfig(model="fake")) as llm,
        pytest.raises(InvalidRequest, match="enable_lora=True"),
    ):
        llm.generate("Hello", PARAMS, lora_request=A)
