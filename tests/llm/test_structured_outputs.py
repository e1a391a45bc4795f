"""`SamplingParams(structured_outputs=...)`: how it reaches the engine, and how a refusal comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import text_kit

from headrace import SamplingParams, StructuredOutputsParams
from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind, ReasoningSpan
from headrace.core.ids import AdmissionId
from headrace.core.request import EngineRequest
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.engine.preparation import Preparations
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.llm.api import LLM
from headrace.text.folder import TextModel, load_text

MakeLLM = Callable[..., LLM]
REFUSED = r"structured_outputs\.regex: expected noted"


class SlowPreparer:
    """A `Preparer` that takes its time for each request, on a thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.engine: Engine | None = None

    def begin(self, request: EngineRequest, admission: AdmissionId) -> Mapping[str, float]:
        assert self.engine is not None
        threading.Timer(self.seconds, self.engine.satisfied, (admission, "grammar")).start()
        return {"grammar": 30.0}

    def end(self, admission: AdmissionId) -> None:
        pass

    def close(self) -> None:
        pass


class RefusingPreparer(SlowPreparer):
    """Notes the grammar of each request, and refuses it."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.seen: list[Grammar | None] = []

    def begin(self, request: EngineRequest, admission: AdmissionId) -> Mapping[str, float]:
        self.seen.append(request.grammar)
        raise InvalidRequest("grammar", "noted")


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
        began = time.monotonic()
        outputs = llm.generate(["x", "y"], SamplingParams(max_tokens=3))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
        assert time.monotonic() - began >= seconds


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
