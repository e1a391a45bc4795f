"""Tests the training tools: growth keeps the function, words keep their pieces, the lean model is the exported one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "src" / "headrace" / "bundled" / "headrace-tiny"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads and lose much to waiting for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(config: Any) -> Any:
    """A model whose every weight is random, and whose residual stream is large beside the norms' epsilon."""
    from tools.train_tiny.model import TinyLlama

    torch.manual_seed(1)
    model = TinyLlama(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    torch.nn.init.normal_(model.embed.weight)
    return model


def logits(model: Any, ids: Any) -> Any:
    with torch.inference_mode():
        return model.hidden(ids) @ model.embed.weight.T


def test_grown_model_gives_the_logits_of_the_small_one() -> None:
    """Wider, deeper, more query heads and more feed-forward units at once."""
    from tools.train_tiny.grow import grow
    from tools.train_tiny.model import TinyConfig, TinyLlama

    small = TinyConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=96, vocab_size=300)
    large = TinyConfig(hidden_size=96, num_layers=4, num_heads=6, num_kv_heads=2, intermediate_size=160, vocab_size=300)
    model, grown = trained(small), TinyLlama(large)
    grown.load_state_dict(grow(dict(model.named_parameters()), small, large))
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(logits(grown, ids), logits(model, ids), rtol=1e-3, atol=1e-3)


def test_growth_that_would_change_the_function_is_refused_by_name() -> None:
    from dataclasses import replace

    from tools.train_tiny.grow import grow
    from tools.train_tiny.model import TinyConfig

    small = TinyConfig(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=96, vocab_size=300)
    with pytest.raises(ValueError, match="these differ: num_kv_heads"):
        grow(dict(trained(small).named_parameters()), small, replace(small, num_heads=4, num_kv_heads=4))


def test_every_part_of_a_grown_model_learns() -> None:
    """A part that starts at zero on both sides would never move."""
    from tools.train_tiny.grow import grow
    from tools.train_tiny.model import TinyConfig, TinyLlama

    small = TinyConfig(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=96, vocab_size=300)
    large = TinyConfig(hidden_size=96, num_layers=2, num_heads=3, num_kv_heads=1, intermediate_size=160, vocab_size=300)
    grown = TinyLlama(large)
    grown.load_state_dict(grow(dict(trained(small).named_parameters()), small, large))
    optimizer = torch.optim.SGD(grown.parameters(), lr=1e-2)
    ids = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        optimizer.zero_grad()
        grown.loss_sum(ids, torch.ones(ids.shape)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert all(bool(parameter.grad.any()) for parameter in grown.parameters())  # type: ignore[union-attr]


def test_word_has_the_same_pieces_with_and_without_a_space_before_it() -> None:
    from tools.train_tiny.corpus import Corpus
    from tools.train_tiny.tokenizer import SPACE, train_tokenizer
    from tools.train_tiny.words import Words

    source = Corpus(3).texts()
    tokenizer = train_tokenizer((next(source) for _ in range(300)), vocab_size=700)
    assert tokenizer.get_vocab_size() == 700
    words = Words(random.Random(4), held_out=True)
    for _ in range(300):
        word = words.noun()
        after_space, bare = tokenizer.encode(f" {word}").tokens, tokenizer.encode(word).tokens
        assert after_space == [SPACE + bare[0], *bare[1:]]


def test_training_copies_the_pieces_of_its_vocabulary_and_no_held_out_word() -> None:
    """Evaluation has no such words: its made-up words are syllables, as the split was decided on."""
    from tools.train_tiny.corpus import Corpus
    from tools.train_tiny.tokenizer import letter_pieces, train_tokenizer
    from tools.train_tiny.words import Words, is_held_out

    source = Corpus(3).texts()
    tokenizer = train_tokenizer((next(source) for _ in range(300)), vocab_size=1200)
    pieces = letter_pieces(tokenizer)
    assert "the" in pieces
    assert all(piece.isalpha() and piece.islower() for piece in pieces)

    def copied(words: Words) -> set[str]:
        made = [words.made_up() for _ in range(4000)]
        assert not any(is_held_out(word) for word in made)
        return {token for word in made for token in tokenizer.encode(word).tokens} & set(pieces)

    with_pieces, without = (copied(Words(random.Random(4), held_out=False, pieces=given)) for given in (pieces, ()))
    assert len(with_pieces) > 0.95 * len(pieces)
    assert len(without) < 0.7 * len(pieces)


def test_training_calls_several_functions_of_one_list_and_evaluation_ends_in_the_first_call() -> None:
    from tools.train_tiny.chat import user
    from tools.train_tiny.tasks import Example
    from tools.train_tiny.tool_tasks import tool_example
    from tools.train_tiny.words import Words

    def calls(held_out: bool) -> list[list[str]]:
        """The names called in each conversation that offers more than one function and ends in a call."""
        words = Words(random.Random(4), held_out=held_out)
        made = [tool_example(words, Example("greeting", [user("Hello")])) for _ in range(500)]
        return [
            [call["function"]["name"] for message in each.messages for call in message.get("tool_calls", ())]
            for each in made
            if len(each.tools) > 1 and each.task == "tool_call"
        ]

    assert any(len(set(names)) > 1 for names in calls(held_out=False))
    assert {len(names) for names in calls(held_out=True)} == {1}


def test_token_of_both_vocabularies_keeps_its_embedding_and_a_new_one_gets_the_mean_of_its_pieces() -> None:
    from tools.train_tiny.corpus import Corpus
    from tools.train_tiny.grow import change_vocabulary
    from tools.train_tiny.tokenizer import SPACE, train_tokenizer

    source = Corpus(3).texts()
    texts = [next(source) for _ in range(300)]
    old, new = train_tokenizer(texts[:100], vocab_size=500), train_tokenizer(texts, vocab_size=700)
    table = torch.randn(500, 8)
    rows = change_vocabulary({"embed.weight": table}, old, new)["embed.weight"]
    ids = old.get_vocab()
    assert rows.shape == (700, 8)
    assert torch.equal(rows[new.token_to_id("R")], table[ids["R"]])
    added = sorted(
        token for token in new.get_vocab() if token not in ids and token.replace(SPACE, "").isascii() and token.strip(SPACE).isalpha()
    )
    assert len(added) > 100
    for token in added:
        pieces = old.encode(token.replace(SPACE, " ")).tokens
        assert "".join(pieces) == token
        torch.testing.assert_close(rows[new.token_to_id(token)], table[[ids[piece] for piece in pieces]].mean(0))


def test_a_new_token_that_is_part_of_a_character_gets_the_mean_of_its_bytes() -> None:
    """It is no text, so that the old vocabulary cannot spell it: it got the bytes of the replacement character."""
    from tools.train_tiny.corpus import Corpus
    from tools.train_tiny.grow import change_vocabulary
    from tools.train_tiny.tokenizer import train_tokenizer

    source = Corpus(3).texts()
    texts = [next(source) for _ in range(100)]
    characters = " ".join(map(chr, range(0x4E10, 0x4E30)))  # all begin with the bytes E4 B8
    old, new = train_tokenizer(texts, vocab_size=500), train_tokenizer([*texts, characters * 100], vocab_size=500)
    part = "\u00e4\u00b8"
    assert old.token_to_id(part) is None
    table = torch.randn(500, 8)
    rows = change_vocabulary({"embed.weight": table}, old, new)["embed.weight"]
    torch.testing.assert_close(rows[new.token_to_id(part)], table[[old.token_to_id(byte) for byte in part]].mean(0))


def test_pairs_of_pieces_differ_by_one_vector_after_every_step_and_the_frequent_one_leads() -> None:
    import numpy as np

    from tools.train_tiny.corpus import Corpus
    from tools.train_tiny.pieces import SharedPieces
    from tools.train_tiny.tokenizer import SPACE, train_tokenizer

    source = Corpus(3).texts()
    tokenizer = train_tokenizer((next(source) for _ in range(300)), vocab_size=700)
    ids, embed = tokenizer.get_vocab(), torch.randn(700, 8)
    before, counts = embed.clone(), np.ones(700, dtype=np.int64)
    pairs = [(ids[token[1:]], at) for token, at in ids.items() if token[0] == SPACE and token[1:] in ids]
    assert len(pairs) > 150
    (rare, frequent), *_ = pairs
    counts[frequent] = 9
    pieces = SharedPieces(embed, tokenizer, counts)
    torch.testing.assert_close(embed[frequent], before[frequent])
    assert not torch.equal(embed[rare], before[rare])
    embed += torch.randn(700, 8)  # a step
    pieces.hold()
    spaces = torch.stack([embed[spaced] - embed[bare] for bare, spaced in pairs])
    torch.testing.assert_close(spaces, spaces[:1].expand_as(spaces))


def test_lean_model_gives_the_logits_of_the_shipped_files_and_writes_them_back() -> None:
    from safetensors.torch import load_file

    from tools.train_tiny.model import TinyLlama, config_from_hf, state_from_hf, state_to_hf

    tensors = load_file(SHIPPED / "model.safetensors")
    config = config_from_hf(json.loads((SHIPPED / "config.json").read_text()))
    model = TinyLlama(config)
    state = state_from_hf(tensors, config)
    model.load_state_dict(state)
    ids = torch.randint(4, 2000, (2, 50), generator=torch.Generator().manual_seed(5))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    with torch.inference_mode():
        torch.testing.assert_close(logits(model, ids), oracle(input_ids=ids).logits, rtol=1e-3, atol=1e-3)
    back = state_to_hf(state, config)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
