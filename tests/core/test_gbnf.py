"""Tests GBNF rewritten as Lark, judged by the compiler that reads it; and how long hostile texts take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from counted_lines import growth
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.core.errors import InvalidRequest
from headrace.core.gbnf import is_gbnf, lark_of_gbnf
from headrace.core.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind

pytestmark = pytest.mark.pure

JSON = r"""
# llama.cpp's grammars/json.gbnf, abridged
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value
             ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


class Bytes:
    """A tokenizer with one token per byte, and an end token."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id = 256, None
        self.tokens = [*[bytes([value]) for value in range(256)], b"<end>"]
        self.special_token_ids = [256]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def accepts(gbnf: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(lark_of_gbnf(gbnf)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize("text", ["{}", '{"a": 1}', '{"a":[1,2,{"b":null}], "c":"x\\ny"}', '{"a":-1.5e+3}\n\t'])
def test_recursive_rules_are_kept(text: str) -> None:
    assert accepts(JSON, text)


@pytest.mark.parametrize("text", ["", "[1]", '{"a":}', '{"a":1,}', '{"a":01}', '{"\\x":1}'])
def test_what_the_grammar_lacks_is_refused(text: str) -> None:
    assert not accepts(JSON, text)


@pytest.mark.parametrize(
    ("gbnf", "taken", "refused"),
    [
        ('root ::= [a-z]* "x"', ["x", "abxx"], ["", "ab"]),  # one lexeme: what the set takes can be given back
        ('root ::= "a" | b\nb ::= "b"\n  | "c"', ["a", "b", "c"], ["", "ab"]),
        ('root ::= ("a" | "b"){2} "c"{0,1} "d"{1,}', ["abd", "bacdd"], ["ad", "abc"]),
        (r'root ::= "\x41\u00e9\U0001F600\"\\\n"', ['A\u00e9\U0001f600"\\\n'], ["A"]),
        (r"root ::= [\]\-a^/] [^a-c\x00-\x20] .", ["]dx", "^\u00e9\n", "//\U0001f600"], ["b", "aax"]),
        ("root ::= [-a] [b-]", ["--", "ab"], ["b-"]),
        ('root ::= fooBar "1" | foo-bar "2" | foo_bar "3"\nfooBar ::= "x"\nfoo-bar ::= "y"\nfoo_bar ::= "z"', ["x1", "y2", "z3"], ["x2"]),
        ('root ::= [a-z]* tail\ntail ::= "x" tail | "y"', ["y", "abxxy"], ["", "ab"]),  # not one lexeme beside a rule that recurses
        ('root ::= "(" root ")" root | ""', ["", "()", "(())()"], ["(", ")"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["", "a"]),
        ('root ::= # nothing yet\n  "a" # done', ["a"], [""]),
    ],
)
def test_each_part_of_the_language(gbnf: str, taken: list[str], refused: list[str]) -> None:
    for text in taken:
        assert accepts(gbnf, text), text
    for text in refused:
        assert not accepts(gbnf, text), text


@pytest.mark.parametrize(
    ("gbnf", "why"),
    [
        ('"a"', "begins with no rule"),
        ('start ::= "a"', "no rule named root"),
        ('root ::= "a" b', "rule b is not defined"),
        ('root ::= "a"\nroot ::= "b"', "root is defined again at line 2, column 1"),
        ('root ::= "a', "begins at line 1, column 10"),
        ('root ::= ("a"', "does not end"),
        ('root ::= "a")', "did not begin"),
        ("root ::= *", "could repeat"),
        ('root ::= "a"**', "could repeat"),
        ('root ::= "a"{3,2}', "ends below its begin"),
        ("root ::= [z-a]", "ends below its begin"),
        ("root ::= []", "no characters"),
        (r'root ::= "\q"', r"\\q is no escape at line 1, column 11"),
        (r'root ::= "\ud800"', "is no escape"),
        ('root ::= ::= "a"', "without a name"),
        ("root ::= " + "(" * 70 + '"a"' + ")" * 70, "more than 64 deep"),
    ],
)
def test_what_is_no_gbnf_is_refused_with_its_place(gbnf: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        lark_of_gbnf(gbnf, name="ebnf")
    assert refused.value.field == "ebnf"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('root ::= "a"', True),
        ('start: "a"', False),
        ('start: "::="', False),
        ('# a ::= b\nstart: "a"', False),
        ('// a ::= b\nx: "a"', False),
        ('%llguidance {}\nx: "::="', False),
        ('start ::= "a"', True),
    ],
)
def test_lark_and_gbnf_are_told_apart(source: str, expected: bool) -> None:
    assert is_gbnf(source) is expected


def test_lark_is_passed_on_as_it_is() -> None:
    assert Grammar.ebnf('start: "a"') == Grammar(GrammarKind.LARK, 'start: "a"')


@pytest.mark.parametrize(
    "of_length",
    [
        lambda n: "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(n // 18)) + f'a{n // 18} ::= "x"',
        lambda n: "root ::= " + "root " * (n // 5),
        lambda n: "root ::= " + "[" + "a" * n + "]",
        lambda n: "root ::= " + "# x\n" * (n // 4) + '"a"',
        lambda n: "root ::= " + '"a" | ' * (n // 6) + '"a"',
        lambda n: "root ::= " + ("(" * 60 + '"a"' + ")" * 60 + " ") * (n // 124),
        lambda n: "\n" * n + 'root ::= "a"',
        lambda n: 'root ::= "a"' + " " * n,
    ],
    ids=["chain", "references", "set", "comments", "alternatives", "groups", "lines", "spaces"],
)
def test_the_longest_text_takes_linear_work(of_length: Callable[[int], str]) -> None:
    """Four times the text takes about four times as much, and the longest one less time than a test may take."""

    def translate(gbnf: str) -> None:
        assert is_gbnf(gbnf)
        assert lark_of_gbnf(gbnf).startswith("start: ")

    assert growth(lambda size: partial(translate, of_length(size)), 16_000) < 4.2
    longest = of_length(MAX_GRAMMAR_BYTES - 10_000)
    assert len(longest) < MAX_GRAMMAR_BYTES
    translate(longest)
