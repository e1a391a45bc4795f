"""Tests adapters, from the folder that PEFT saves to the logits, against PEFT on the transformers model in float32."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headrace.bundled import DEFAULT_MODEL, FOLDER
from headrace.tensor.adapters.loader import AdapterLoader
from headrace.tensor.backends import load_backend
from headrace.tensor.batch import PackedAdapter
from headrace.tensor.device import CPU
from headrace.tensor.models import load_model

pytestmark = [
    pytest.mark.pure,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft calls what transformers renamed
]

VOCAB = 97
TINY = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True},
    "Phi3": {},
    "Qwen3Moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
}
SEPARATE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
VARIANTS: dict[str, dict[str, Any]] = {
    "rank pattern": {"r": 3, "rank_pattern": {"v_proj": 7, r"layers\.[12]\.mlp\..*": 2, "model.layers.0.mlp.up_proj": 5}},
    "alpha pattern": {"alpha_pattern": {"0.self_attn.q_proj": 1, r"self_attn\.(k|q)_proj": 24, "down_proj|up_proj": 3}},
    "rank stabilized": {"r": 5, "use_rslora": True, "lora_alpha": 2.5, "rank_pattern": {"^model.layers.1.*": 2}},
    "regular expression": {"target_modules": r"model\.layers\.[02]\..*\.(q_proj|up_proj)"},
    "some layers": {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "one layer": {"layers_to_transform": 1},
    "excluded": {"exclude_modules": ["1.self_attn.q_proj", "down_proj"]},
    "excluded by pattern": {"target_modules": "all-linear", "exclude_modules": r".*\.mlp\..*"},
    "activation-aware start": {"init_lora_weights": "orthogonal", "r": 4},
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("Llama", {"target_modules": [each]}) for each in SEPARATE),
    *(("Phi3", {"target_modules": [each]}) for each in FUSED),
    *((family, {"target_modules": "all-linear"}) for family in ("Llama", "Phi3")),
    ("Qwen3Moe", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    *(("Llama", {"target_modules": list(SEPARATE), **fields}) for fields in VARIANTS.values()),
]
IDS = [f"{family}-{fields['target_modules'][0]}" for family, fields in CASES[: -len(VARIANTS)]] + list(VARIANTS)


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft")  # here, because its import takes seconds and every process collects this file


@dataclass
class Served:
    """base: a transformers model in float32; model: ours with its weights"""

    base: Any
    model: Any

    @property
    def loader(self) -> AdapterLoader:
        return AdapterLoader(self.model.adapters, max_rank=8)


def served(folder: Path, base: Any, kernels: str = "reference") -> Served:
    loaded = load_model(folder, backend=load_backend(kernels), dtype=torch.float32, device=CPU, load_format="auto", seed=0,
                        max_model_len=None, enable_lora=True)  # fmt: skip
    return Served(base, loaded.model)


@pytest.fixture(scope="module")
def families(make_oracle: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    made = {}
    for family, fields in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        made[family] = served(folder, make_oracle(family, folder, **TINY, **fields).model)
    return made


def trained(peft: Any, base: Any, folder: Path, **fields: Any) -> Any:
    """A PEFT model with random weights, saved into `folder`."""
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **fields})
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    generator = torch.Generator().manual_seed(len(str(fields)))
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return model


def load(loader: AdapterLoader, folder: Path) -> PackedAdapter:
    return loader.load(folder, loader.inspect(folder))


def logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([tokens])).logits[0]
    return found.float()


def prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    generator = random.Random(str(lengths))
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(("family", "fields"), CASES, ids=IDS)
def test_logits_are_those_of_peft(
    families: dict[str, Served], peft: Any, family: str, fields: dict[str, Any], tmp_path: Path,
    paged_run: Any, assert_close: Callable[..., None],
) -> None:  # fmt: skip
    ours, (tokens, others) = families[family], prompts(VOCAB, 23, 9)
    oracle = trained(peft, ours.base, tmp_path, **fields)
    run = paged_run(ours.model, resident=(None, load(ours.loader, tmp_path)))
    run.add(tokens, place=1)
    run.add(others)
    run.finish(chunk=7)
    assert_close(run.logits(0), logits(oracle, tokens))
    assert_close(run.logits(1), logits(ours.base, others))
    assert not torch.allclose(run.logits(0), logits(ours.base, tokens), atol=0.05)


def test_adapters_and_the_base_share_a_step(
    families: dict[str, Served], peft: Any, tmp_path: Path, paged_run: Any, assert_close: Callable[..., None]
) -> None:  # fmt: skip
    ours, tokens = families["Llama"], prompts(VOCAB, 21, 1, 17, 12, 6)
    first = trained(peft, ours.base, tmp_path / "a", target_modules=["q_proj", "down_proj"])
    second = trained(peft, ours.base, tmp_path / "b", target_modules="all-linear", r=8)
    run = paged_run(ours.model, resident=(None, load(ours.loader, tmp_path / "b"), None, load(ours.loader, tmp_path / "a")))
    places = {0: ours.base, 1: second, 3: first}
    rows = list(zip(tokens, (3, 0, 1, 3, 1), strict=True))
    for row, place in rows:
        run.add(row, place=place)
    run.step({3: 5, 0: 8, 4: 1})
    run.finish(chunk=4)
    for index, (row, place) in enumerate(rows):
        assert_close(run.logits(index), logits(places[place], row))


@pytest.mark.parametrize("kernels", ["reference", "numba"])
def test_bundled_adapters_are_those_of_peft(kernels: str, peft: Any, paged_run: Any, assert_close: Callable[..., None]) -> None:
    folder, adapters = FOLDER / DEFAULT_MODEL, sorted(FOLDER.glob("adapters/*/adapter_config.json"))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, tokens = served(folder, base, kernels), prompts(base.config.vocab_size, 19, 8)
    run = paged_run(ours.model, resident=(None, *(load(ours.loader, config.parent) for config in adapters)))
    for place, row in enumerate(tokens, 1):
        run.add(row, place=place)
    run.finish(chunk=6)
    for index, config in enumerate(adapters):
        oracle = peft.PeftModel.from_pretrained(copy.deepcopy(base), config.parent).eval()
        assert_close(run.logits(index), logits(oracle, tokens[index]))
