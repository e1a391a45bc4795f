"""llama.cpp's grammar language, GBNF, rewritten as Lark in time linear in its length.

A rule that reaches no recursion becomes a terminal of Lark, which the lexer matches as a whole: as many characters as it can. A grammar
without recursion therefore keeps its meaning exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.core.errors import InvalidRequest

MAX_GROUP_DEPTH = 64
MAX_NAME_CHARS = 40
"""Characters of a rule's name that its Lark name repeats."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
    |(?P<define>::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<text>[^"\\]*(?:\\.[^"\\]*)*)"
    |\[(?P<set>[^\]\\]*(?:\\.[^\]\\]*)*)\]
    |(?P<count>[*+?]|\{\s*[0-9]{1,6}\s*(?:,\s*[0-9]{0,6}\s*)?\})
    |(?P<mark>[|().])""",
    re.VERBOSE | re.DOTALL,
)
_CHAR = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|([^\\])", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {char: char for char in '\\"[]-^/'}
_COMMENT = re.compile(r"(?:#|//).*")
_LARK_ONLY = re.compile(r"(?m)^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:))")


def is_gbnf(source: str) -> bool:
    """Whether a text is GBNF rather than Lark: it has `::=` outside comments (vLLM's test), and no line starts with Lark's `start:`."""
    if "::=" not in source or _LARK_ONLY.search(source):
        return False
    return any("::=" in _COMMENT.sub("", line) for line in source.split("\n"))


def lark_of_gbnf(source: str, *, name: str = "grammar") -> str:
    """Raises InvalidRequest naming the field `name`; the remedy says where and why."""
    try:
        return _Writer(_Parser(source).rules()).lark()
    except NotGbnf as error:
        raise InvalidRequest(name, "a GBNF grammar", remedy=f"{error}.") from None


class NotGbnf(Exception):
    """The message says why."""


# --------------------------------------------------------------------------------------------------------------------------- reading


@dataclass(slots=True)
class _Lexeme:
    lark: str


@dataclass(slots=True)
class _Reference:
    rule: str


@dataclass(slots=True)
class _Repetition:
    part: _Part
    count: str


@dataclass(slots=True)
class _Alternatives:
    sequences: list[list[_Part]] = field(default_factory=lambda: [[]])


_Part = _Lexeme | _Reference | _Repetition | _Alternatives
_Match = re.Match[str]


class _Parser:
    """A name before `::=` begins a rule; line ends do not end one."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = list(self._read())

    def _read(self) -> Iterator[_Match]:
        position = 0
        while position < len(self._source):
            match = _TOKEN.match(self._source, position)
            if match is None:
                raise self._fault("Nothing that a grammar is made of begins", position)
            if match.lastgroup != "space":
                yield match
            position = match.end()

    def _fault(self, what: str, position: int) -> NotGbnf:
        line, column = self._source.count("\n", 0, position) + 1, position - self._source.rfind("\n", 0, position)
        return NotGbnf(f"{what} at line {line}, column {column}")

    def rules(self) -> dict[str, _Alternatives]:
        begins = [at - 1 for at, token in enumerate(self._tokens) if token.lastgroup == "define"]
        if not begins or begins[0] != 0:
            raise NotGbnf("It begins with no rule (name ::= ...)")
        found: dict[str, _Alternatives] = {}
        for begin, end in zip(begins, [*begins[1:], len(self._tokens)], strict=True):
            head = self._tokens[begin]
            if head.lastgroup != "name":
                raise self._fault("A rule without a name begins", head.start())
            if head.group() in found:
                raise self._fault(f"The rule {head.group()[:MAX_NAME_CHARS]} is defined again", head.start())
            found[head.group()] = self._right_side(self._tokens[begin + 2 : end])
        if "root" not in found:
            raise NotGbnf("It has no rule named root, where matching begins")
        return found

    def _right_side(self, tokens: Sequence[_Match]) -> _Alternatives:
        groups = [_Alternatives()]  # outermost first
        for token in tokens:
            sequence = groups[-1].sequences[-1]
            match token.group():
                case "|":
                    groups[-1].sequences.append([])
                case "(":
                    if len(groups) > MAX_GROUP_DEPTH:
                        raise self._fault(f"Groups are nested more than {MAX_GROUP_DEPTH} deep", token.start())
                    groups.append(_Alternatives())
                    sequence.append(groups[-1])
                case ")":
                    if len(groups) == 1:
                        raise self._fault("A group that did not begin ends", token.start())
                    groups.pop()
                case _:
                    self._add(token, sequence)
        if len(groups) > 1:
            raise self._fault("A group does not end: its rule ends", tokens[-1].end())
        return groups[0]

    def _add(self, token: _Match, sequence: list[_Part]) -> None:
        match token.lastgroup, token.group():
            case "count", count:
                if not sequence or isinstance(sequence[-1], _Repetition):
                    raise self._fault(f"Nothing that {count} could repeat stands before it", token.start())
                sequence[-1] = _Repetition(sequence[-1], self._lark_count(count, token.start()))
            case "name", name:
                sequence.append(_Reference(name))
            case "text", _:
                sequence.append(_Lexeme(json.dumps("".join([char for char, _ in self._chars(token, "text")]))))
            case "set", _:
                sequence.append(_Lexeme(self._set(token)))
            case _, ".":
                sequence.append(_Lexeme(r"/(.|\n)/"))

    def _lark_count(self, count: str, position: int) -> str:
        low, _, high = re.sub(r"[\s{}]", "", count).partition(",")
        if high and int(high) < int(low):
            raise self._fault(f"The count {count} ends below its begin", position)
        return re.sub(r"\s", "", count)

    def _chars(self, token: _Match, group: str) -> Iterator[tuple[str, bool]]:
        """Each character, with whether it was written as an escape."""
        for match in _CHAR.finditer(token[group]):
            code = match[1] or match[2] or match[3]
            char = match[5] or _ESCAPES.get(match[4] or "")
            if code is not None and (number := int(code, 16)) <= 0x10FFFF and not 0xD800 <= number < 0xE000:
                char = chr(number)
            if char is None:
                raise self._fault(f"{match.group()} is no escape", token.start(group) + match.start())
            yield char, match[5] is None

    def _set(self, token: _Match) -> str:
        chars = list(self._chars(token, "set"))
        is_negated = bool(chars) and chars[0] == ("^", False)
        del chars[:is_negated]
        if not chars:
            raise self._fault("A set of no characters begins", token.start())
        made: list[str] = []
        at = 0
        while at < len(chars):
            is_range = at + 2 < len(chars) and chars[at + 1] == ("-", False)
            low, high = chars[at][0], chars[at + 2 * is_range][0]
            if high < low:
                raise self._fault("A range of characters ends below its begin", token.start())
            made.append(f"{_in_regex(low)}-{_in_regex(high)}" if is_range else _in_regex(low))
            at += 3 if is_range else 1
        return f"/[{'^' if is_negated else ''}{''.join(made)}]/"


def _in_regex(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"


# --------------------------------------------------------------------------------------------------------------------------- writing


class _Writer:
    def __init__(self, rules: Mapping[str, _Alternatives]) -> None:
        self._rules = rules
        self._regular = _regular_rules({name: set(_references(rule)) for name, rule in rules.items()})
        self._names = {name: self._lark_name(number, name) for number, name in enumerate(rules)}

    def _lark_name(self, number: int, name: str) -> str:
        word = re.sub(r"[^a-z0-9]", "_", name[:MAX_NAME_CHARS].lower())
        return f"T{number}_{word.upper()}" if name in self._regular else f"r{number}_{word}"

    def lark(self) -> str:
        rules = [f"{self._names[name]}: {self._written(rule)}\n" for name, rule in self._rules.items()]
        return f"start: {self._names['root']}\n" + "".join(rules)

    def _written(self, part: _Part) -> str:
        match part:
            case _Lexeme():
                return part.lark
            case _Reference():
                return self._names[part.rule]
            case _Repetition():
                return self._written(part.part) + part.count
            case _Alternatives():
                return "(" + " | ".join([" ".join(map(self._written, sequence)) or '""' for sequence in part.sequences]) + ")"


def _references(part: _Part) -> Iterator[str]:
    match part:
        case _Reference():
            yield part.rule
        case _Repetition():
            yield from _references(part.part)
        case _Alternatives():
            for sequence in part.sequences:
                for each in sequence:
                    yield from _references(each)


def _regular_rules(references: Mapping[str, set[str]]) -> set[str]:
    """The rules from which no recursion is reached. references: rule -> rules it names. Raises NotGbnf for an unknown rule."""
    users: dict[str, list[str]] = {name: [] for name in references}
    for name, used in references.items():
        for other in used:
            if other not in users:
                raise NotGbnf(f"The rule {other[:MAX_NAME_CHARS]} is not defined")
            users[other].append(name)
    num_open = {name: len(used) for name, used in references.items()}
    found = [name for name, count in num_open.items() if count == 0]
    for name in found:  # grows while it is read: every rule whose last open reference this was
        for user in users[name]:
            num_open[user] -= 1
            if num_open[user] == 0:
                found.append(user)
    return set(found)
