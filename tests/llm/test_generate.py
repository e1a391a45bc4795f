"""Tests `LLM` over the real scheduler and loop: what comes back, in which order, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.core.errors import EngineFatal, InvalidRequest, Unavailable
from headrace.core.ids import RequestId
from headrace.core.request import EngineRequest
from headrace.core.sampling import SamplingParams
from headrace.core.update import FinishReason
from headrace.engine.config import EngineConfig
from headrace.lab.fake_runner import FakeOptions, fake_answer, fake_engine
from headrace.llm.api import LLM
from headrace.llm.outputs import GenerationFailed
from headrace.text.folder import TextModel

pytestmark = pytest.mark.pure

MakeLLM = Callable[..., LLM]
SIX = SamplingParams(seed=7, max_tokens=6)


def oracle(text: TextModel, prompt_ids: list[int], params: SamplingParams, index: int = 0, **options: Any) -> list[int]:
    fake = FakeOptions(vocab_size=text.tokenizer.vocab_size, max_model_len=256, **options)
    request = EngineRequest(request_id=RequestId("x"), prompt_ids=tuple(prompt_ids), params=params)
    return fake_answer(request, index, params.max_tokens or 256 - len(prompt_ids), fake)


def test_answers_come_in_the_order_of_the_prompts(make_llm: MakeLLM, text: TextModel) -> None:
    prompts = [f"Hello {number} " * (1 + number % 5) for number in range(40)]
    params = [SamplingParams(seed=number, max_tokens=1 + number % 9) for number in range(40)]
    outputs = make_llm(config=EngineConfig(model="fake", max_num_seqs=8, max_num_batched_tokens=32)).generate(prompts, params)
    for output, prompt, each in zip(outputs, prompts, params, strict=True):
        ids = text.tokenizer.encode(prompt, add_special_tokens=True)
        assert (output.prompt, output.prompt_token_ids, output.finished) == (prompt, ids, True)
        assert output.outputs[0].token_ids == oracle(text, ids, each)
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].text == text.tokenizer.join(output.outputs[0].token_ids).decode("utf-8", "replace")
    assert len({output.request_id for output in outputs}) == 40


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("Hello", 1),
        (["Hello", "Bye"], 2),
        ([65, 66], 1),
        ([[65, 66], [67]], 2),
        ({"prompt": "Hello"}, 1),
        ([{"prompt_token_ids": [65, 66]}, {"prompt": "x"}, "y", (65, 66)], 4),
        ([], 0),
    ],
)
def test_prompts_may_be_texts_ids_and_objects(make_llm: MakeLLM, prompts: Any, count: int) -> None:
    outputs = make_llm().generate(prompts, SIX)
    assert len(outputs) == count
    assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)


def test_token_prompts_are_used_as_they_are(make_llm: MakeLLM) -> None:
    (output,) = make_llm().generate({"prompt_token_ids": [65, 66]}, SIX)
    assert (output.prompt, output.prompt_token_ids) == (None, [65, 66])


def test_control_tokens_in_the_programs_own_text_are_control_tokens(make_llm: MakeLLM, text: TextModel) -> None:
    (output,) = make_llm().generate("<|im_start|>user", SIX)
    assert text.tokenizer.token_to_id("<|im_start|>") in output.prompt_token_ids


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        (5, "prompts"),
        (["ok", 5], "prompts[1]"),
        (["ok", {"prompt": "x", "images": 1}], "prompts[1].images"),
        ([{"prompt": "x", "prompt_token_ids": [1]}], "prompts[0]"),
        ({}, "prompts"),
        ({"prompt": [1]}, "prompts.prompt"),
        ({"prompt_token_ids": "x"}, "prompts.prompt_token_ids"),
        (["ok", "\ud800"], "prompts[1]"),
        (["ok", [1, 10**9]], "prompt"),
        (["ok", [True]], "prompts[1]"),
        (["ok", []], "prompt"),
        (["ok", "x" * 2000], "prompt"),
    ],
)
def test_one_bad_prompt_refuses_the_list_before_anything_runs(make_llm: MakeLLM, prompts: Any, field: str) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(prompts, SIX)
    assert caught.value.field == field
    assert llm.engine.snapshot().counters.steps == 0


def test_the_offending_prompt_is_named(make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_llm().generate([[1], [10**9]], SIX)
    assert caught.value.__notes__ == ["in prompts[1]"]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ([SIX], "sampling_params"),
        ([SIX, "x"], "sampling_params"),
        (SamplingParams(temperature=-1), "temperature"),
        (SamplingParams(max_tokens=500), "max_tokens"),
    ],
)
def test_bad_parameters_are_refused_before_anything_runs(make_llm: MakeLLM, params: Any, field: str) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["a", "b"], params)
    assert caught.value.field == field
    assert llm.engine.snapshot().counters.steps == 0


def test_n_sequences_are_answered_apart(make_llm: MakeLLM, text: TextModel) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=5)
    (output,) = make_llm().generate("Hello there", params)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    for each in output.outputs:
        assert each.token_ids == oracle(text, output.prompt_token_ids, params, each.index)


def test_an_end_token_ends_the_answer_without_text(make_llm: MakeLLM, text: TextModel) -> None:
    (output,) = make_llm(eos_after=3).generate("Hello", SamplingParams(seed=1, max_tokens=20))
    (answer,) = output.outputs
    assert answer.token_ids[-1] == text.tokenizer.vocab_size - 1
    assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (4, "stop", None)
    assert answer.text == text.tokenizer.join(answer.token_ids[:-1]).decode("utf-8", "replace")


def stop_for(text: TextModel, prompt: str, params: SamplingParams) -> tuple[str, str]:
    """A stop string that appears in what will be answered, and the text before it."""
    whole = text.tokenizer.join(oracle(text, text.tokenizer.encode(prompt, add_special_tokens=True), params)).decode("utf-8", "replace")
    middle = len(whole) // 2
    stop = whole[middle : middle + 2]
    return stop, whole[: whole.index(stop)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stop_string_ends_the_answer_and_frees_the_engine(make_llm: MakeLLM, text: TextModel, depth: int) -> None:
    plain = SamplingParams(seed=3, max_tokens=60)
    stop, before = stop_for(text, "Hello", plain)
    llm = make_llm(config=EngineConfig(model="fake", depth=depth))
    (output,) = llm.generate("Hello", plain.with_(stop=(stop,)))
    (answer,) = output.outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (before, "stop", stop)
    assert answer.token_ids == oracle(text, output.prompt_token_ids, plain)[: len(answer.token_ids)]
    assert len(answer.token_ids) < 60
    counters = llm.engine.snapshot().counters
    assert counters.generation_tokens == len(answer.token_ids)
    assert counters.finished == {"stop": 1}


def test_logprobs_have_one_map_per_token(make_llm: MakeLLM, text: TextModel) -> None:
    (output,) = make_llm().generate("Hello you", SamplingParams(seed=1, max_tokens=4, logprobs=2, prompt_logprobs=1))
    (answer,) = output.outputs
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 4
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert len(entry) == 2
        assert entry[token_id].rank == 1
        assert entry[token_id].decoded_token == text.tokenizer.token_text(token_id)
    assert answer.cumulative_logprob == pytest.approx(-2.0)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == output.prompt_token_ids[1:]


def test_prompt_logprobs_come_once_for_several_sequences(make_llm: MakeLLM) -> None:
    config = EngineConfig(model="fake", max_num_batched_tokens=8, max_num_seqs=4)
    (output,) = make_llm(config=config).generate(
        "Hello you and everybody else", SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=0)
    )
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_without_logprobs_none_are_made(make_llm: MakeLLM) -> None:
    (output,) = make_llm().generate("Hello", SIX)
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob, output.prompt_logprobs) == (None, None, None)


def test_without_detokenizing_there_is_no_text(make_llm: MakeLLM) -> None:
    (output,) = make_llm().generate("Hello", SIX.with_(detokenize=False))
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 6


def test_a_seed_of_the_llm_makes_a_run_repeatable_and_requests_differ(make_llm: MakeLLM) -> None:
    unseeded = SamplingParams(max_tokens=8)
    runs = [[o.outputs[0].token_ids for o in make_llm(seed=4).generate(["Hello", "Hello"], unseeded)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
    assert [o.outputs[0].token_ids for o in make_llm(seed=None).generate(["Hello"] * 2, unseeded)] not in runs


def test_the_models_own_defaults_apply_when_no_parameters_are_given(make_llm: MakeLLM) -> None:
    llm = make_llm(change_info=lambda info: replace(info, sampling_defaults={"temperature": 0.5, "max_tokens": 3}))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, max_tokens=3)
    assert len(llm.generate("Hello")[0].outputs[0].token_ids) == 3


def test_the_models_own_length_is_cut_to_what_the_context_leaves(make_llm: MakeLLM) -> None:
    """A default is cut to what fits, as in the server; a request for more is refused."""
    llm = make_llm(change_info=lambda info: replace(info, sampling_defaults={"max_tokens": 10_000}))
    outputs = llm.generate([[7] * 200, [7] * 250])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [56, 6]
    with pytest.raises(InvalidRequest, match="max_tokens"):
        llm.generate([[7] * 200], SamplingParams(max_tokens=10_000))


def test_a_shared_beginning_is_taken_from_the_cache(make_llm: MakeLLM) -> None:
    llm = make_llm()
    prompt = "The quick brown fox jumps over the lazy dog. " * 3
    first, second = llm.generate(prompt, SIX)[0], llm.generate(prompt, SIX)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens > 16
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_metrics_follow_the_order_of_events(make_llm: MakeLLM) -> None:
    (output,) = make_llm().generate("Hello", SIX)
    metrics = output.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.queue_time_s is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert metrics.queue_time_s >= 0


def test_more_prompts_than_may_wait_are_handed_in_piece_by_piece(make_llm: MakeLLM) -> None:
    llm = make_llm(config=EngineConfig(model="fake", max_num_seqs=2, max_num_batched_tokens=16, max_waiting=3))
    outputs = llm.generate(["Hello"] * 20 + ["x"], [SIX] * 20 + [SIX.with_(n=3)])
    assert all(output.finished for output in outputs)


def test_a_failed_sequence_raises_after_its_neighbours_are_done(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    scheduler = llm.engine.scheduler
    plan = scheduler.plan
    steps = []

    def failing(now: float, *costs: Any) -> Any:
        steps.append(now)
        if len(steps) == 3:
            scheduler.sequences.fail(next(iter(scheduler.sequences._families.values()))[0], "its step failed", 0.0)
        return plan(now, *costs)

    monkeypatch.setattr(scheduler, "plan", failing)
    with pytest.raises(GenerationFailed, match="prompt 0: its step failed") as failed:
        llm.generate(["Hello", "Bye"], SIX)
    assert [output.outputs[0].finish_reason for output in failed.value.outputs] == ["error", "length"]
    assert len(failed.value.outputs[1].outputs[0].token_ids) == 6
    assert llm.engine.snapshot().counters.finished == {FinishReason.ERROR.value: 1, FinishReason.LENGTH.value: 1}


def test_an_interrupt_leaves_nothing_behind(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    turn = llm.engine.turn
    turns = []

    def interrupted() -> bool:
        turns.append(1)
        if len(turns) == 3:
            raise KeyboardInterrupt
        return turn()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "turn", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Hello"] * 5, SamplingParams(seed=1, max_tokens=100))
    assert llm.engine.snapshot().num_running == 0
    assert llm.generate("Hello", SIX)[0].finished


def test_a_dead_engine_says_so_and_stays_closed(text: TextModel) -> None:
    options = FakeOptions(vocab_size=text.tokenizer.vocab_size, max_model_len=256, die_after_steps=3)
    llm = LLM.over(lambda config, outbox: fake_engine(outbox, options, config), text, config=EngineConfig(model="fake"))
    with pytest.raises(EngineFatal):
        llm.generate("Hello", SIX)
    with pytest.raises(Unavailable):
        llm.generate("Hello", SIX)


def test_after_shutdown_nothing_is_answered(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        llm.generate("Hello", SIX)
    llm.shutdown()
    with pytest.raises(Unavailable):
        llm.generate("Hello", SIX)


@pytest.mark.socket
def test_threads_take_turns(make_llm: MakeLLM, text: TextModel) -> None:
    from concurrent.futures import ThreadPoolExecutor

    llm = make_llm()
    with ThreadPoolExecutor(4) as pool:
        outputs = [future.result()[0] for future in [pool.submit(llm.generate, f"Hello {n}", SIX) for n in range(8)]]
    for output in outputs:
        assert output.outputs[0].token_ids == oracle(text, output.prompt_token_ids, SIX)
