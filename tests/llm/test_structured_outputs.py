"""Tests `SamplingParams(structured_outputs=...)`: how it reaches the engine, and how a refusal comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import text_kit

from headrace import SamplingParams, StructuredOutputsParams
from headrace.core.errors import InvalidRequest, Overloaded
from headrace.core.grammar import Grammar, GrammarKind, ReasoningSpan
from headrace.core.ids import PreparationId
from headrace.core.request import EngineRequest
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.engine.preparation import Preparations
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.llm.api import LLM
from headrace.text.folder import TextModel, load_text

pytestmark = pytest.mark.socket

MakeLLM = Callable[..., LLM]
REFUSED = r"structured_outputs\.regex: expected noted"


class SlowPreparer:
    """A `Preparer` that takes its time for each request, on a thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.engine: Engine | None = None

    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> Mapping[str, float]:
        assert self.engine is not None
        threading.Timer(self.seconds, self.engine.satisfied, (preparation_id, "grammar")).start()
        return {"grammar": 300.0}

    def end(self, preparation_id: PreparationId) -> None:
        pass

    def close(self) -> None:
        pass


class RefusingPreparer(SlowPreparer):
    """Notes the grammar of each request, and refuses it."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.seen: list[Grammar | None] = []

    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> Mapping[str, float]:
        self.seen.append(request.grammar)
        raise InvalidRequest("grammar", "noted")


class SmallPreparer(SlowPreparer):
    """Has room for `room` requests at once."""

    def __init__(self, room: int) -> None:
        super().__init__(0.0)
        self.room = room
        self.held: set[PreparationId] = set()
        self.num_refused = 0

    def begin(self, request: EngineRequest, preparation_id: PreparationId) -> Mapping[str, float]:
        if len(self.held) >= self.room:
            self.num_refused += 1
            raise Overloaded("the grammars in use take all of their memory")
        self.held.add(preparation_id)
        return super().begin(request, preparation_id)

    def end(self, preparation_id: PreparationId) -> None:
        self.held.remove(preparation_id)


def llm_with(preparer: SlowPreparer, text: TextModel) -> LLM:
    def build(config: EngineConfig, outbox: Outbox) -> Engine:
        engine = fake_engine(outbox, FakeOptions(vocab_size=text.tokenizer.vocab_size, max_model_len=256), config)
        engine._preparations = Preparations(preparer, engine._failures)
        preparer.engine = engine
        return engine

    return LLM.over(build, text, config=EngineConfig(model="fake"), seed=0)


def test_an_engine_that_compiles_no_grammars_refuses_the_field_that_was_written(make_llm: MakeLLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex: expected none: this engine compiles no grammars"):
        make_llm().generate("x", params)


def test_what_cannot_be_a_grammar_is_refused_before_anything_runs(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.choice") as caught:
        llm.generate(["x", "y"], [SamplingParams(), SamplingParams(structured_outputs=StructuredOutputsParams(choice=[]))])
    assert caught.value.__notes__ == ["in prompts[1]"]
    assert llm.engine.snapshot().counters.steps == 0


@pytest.mark.parametrize("seconds", [0.0, 0.4])
def test_a_call_waits_for_what_is_prepared_on_another_thread(text: TextModel, seconds: float) -> None:
    """Nothing can run meanwhile, and the engine has not lost the request."""
    with llm_with(SlowPreparer(seconds), text) as llm:
        outputs = llm.generate(["x", "y"], SamplingParams(max_tokens=3))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]


@pytest.mark.parametrize(("opening", "is_open"), [("", False), ("<think>\n", True)], ids=["not yet", "opened by the prompt"])
def test_in_a_conversation_a_grammar_binds_after_the_reasoning(tmp_path: Path, opening: str, is_open: bool) -> None:
    template = f"{text_kit.CHATML}{opening}{{% if false %}}<think></think>{{% endif %}}"
    text = load_text(text_kit.save_byte_level(tmp_path / "model", chat_template=template))
    preparer, params = RefusingPreparer(), SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with llm_with(preparer, text) as llm:
        with pytest.raises(InvalidRequest, match=REFUSED):
            llm.chat([{"role": "user", "content": "x"}], params)
        with pytest.raises(InvalidRequest, match=REFUSED):
            llm.generate("x", params)
    chat, plain = preparer.seen
    assert chat == Grammar(GrammarKind.REGEX, "a+", ReasoningSpan(start="<think>", end="</think>", is_open=is_open))
    assert plain == Grammar(GrammarKind.REGEX, "a+")


def test_prompts_for_which_the_engine_has_no_room_wait_for_the_others(text: TextModel) -> None:
    """A list of prompts may have more different grammars than an engine holds at once."""
    preparer = SmallPreparer(room=3)
    with llm_with(preparer, text) as llm:
        outputs = llm.generate([f"x{number}" for number in range(20)], [SamplingParams(max_tokens=2 + number) for number in range(20)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2 + number for number in range(20)]
    assert 0 < preparer.num_refused <= 20, "from then on no more are submitted than there is room for"
    assert not preparer.held


def test_a_prompt_for_which_there_is_never_room_is_refused(text: TextModel) -> None:
    with llm_with(SmallPreparer(room=0), text) as llm, pytest.raises(Overloaded, match="take all of their memory"):
        llm.generate(["x", "y"], SamplingParams(max_tokens=2))
