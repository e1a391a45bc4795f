"""The bundled models are what their cards say: loadable, small, safe, and answering as recorded.

The oracle is transformers on the same files. The fixed answers change only when the weights are trained again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.pure

BUNDLED = Path(__file__).parents[2] / "src" / "headrace" / "bundled"
TINY, DRAFT = BUNDLED / "headrace-tiny", BUNDLED / "headrace-draft"
ADAPTERS = {"pirate": BUNDLED / "adapters" / "pirate", "hardware-shop": BUNDLED / "adapters" / "hardware-shop"}
EXPECTED: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "expected_answers.json").read_text())
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load(TINY)


def answer(model: Any, tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    inputs = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("question", EXPECTED["headrace-tiny"])
def test_fixed_prompt_gets_its_recorded_greedy_answer(question: str, tiny: Any, tokenizer: Any) -> None:
    assert answer(tiny, tokenizer, user(question)) == EXPECTED["headrace-tiny"][question]


def test_offered_tools_are_answered_in_the_form_of_a_call(tiny: Any, tokenizer: Any) -> None:
    """The form only: the card says how often the arguments are right."""
    text = answer(tiny, tokenizer, user("What is the weather in Oslo?"), [WEATHER])
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert call["name"] == "get_weather"
    assert list(call["arguments"]) == ["city"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft calls what transformers renamed
@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_adapter_changes_the_answer_as_its_card_says(name: str, tokenizer: Any) -> None:
    """A fresh base for each adapter: peft replaces modules in place."""
    peft = pytest.importorskip("peft")  # here, because its import takes seconds and every process collects this file
    base = load(TINY)
    plain = {question: answer(base, tokenizer, user(question)) for question in EXPECTED[name]}
    tuned_model = peft.PeftModel.from_pretrained(base, str(ADAPTERS[name]))
    for question, expected in EXPECTED[name].items():
        assert plain[question] != expected
        assert answer(tuned_model, tokenizer, user(question)) == expected


def test_draft_shares_the_tokenizer_and_gives_logits_over_the_same_vocabulary(tiny: Any, tokenizer: Any) -> None:
    assert (DRAFT / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    draft = load(DRAFT)
    ids = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    assert draft(input_ids=ids).logits.shape == tiny(input_ids=ids).logits.shape
    assert draft.num_parameters() < tiny.num_parameters() / 2


def test_weights_are_small_and_nothing_can_run_code_when_loaded() -> None:
    files = [path for path in BUNDLED.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    assert sum(path.stat().st_size for path in files if path.suffix == ".safetensors") <= 16 * 1024 * 1024
    files.remove(BUNDLED / "classifier.bin")  # numbers alone: `text.classifier` reads them by `np.frombuffer`
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja", ".md", ".py"}


def test_all_weights_are_bf16() -> None:
    from safetensors import safe_open

    for path in BUNDLED.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            assert {tensors.get_slice(key).get_dtype() for key in tensors.keys()} == {"BF16"}, path  # noqa: SIM118


@pytest.mark.parametrize("folder", [TINY, DRAFT, *ADAPTERS.values()], ids=lambda folder: folder.name)
def test_card_reports_held_out_results_beside_the_baseline(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    assert "majority baseline" in card
    assert "training loss" in card


def test_generation_stops_at_both_end_tokens(tokenizer: Any) -> None:
    stops = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(stops) == ["<|im_end|>", "<|endoftext|>"]
