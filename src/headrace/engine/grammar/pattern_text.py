"""Translates a pattern of JSON Schema for llguidance: ECMAScript's regular expressions, of which a text must match some part.

llguidance knows `^` and `$` at the ends alone, so an expression is split into up to four pieces: what matches anywhere, at the text's
beginning, at its end, and as the whole text.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.engine.grammar.char_sets import ANY, CharSet
from headrace.engine.grammar.ecma_pattern import Anchor, Chars, Choice, Concatenation, LookAhead, Node, PatternRefused, Repeat, parsed

_START, _END = Anchor(is_start=True), Anchor(is_start=False)
_REST = Repeat(Chars(ANY))

AFTER_START = "a pattern whose look-around stands directly after ^"

MAX_EXCLUDED_CHARS = 40


def without_look_around(node: Node) -> list[Node]:
    """Trees without look-around, which llguidance does not support. Raises PatternRefused.

    Supported are look-around between `^` and the rest, and negative conditions whose opposite is known.
    """
    parts = node.parts if isinstance(node, Concatenation) else (node,)
    num_conditions = 0
    while num_conditions + 1 < len(parts) and parts[0] == _START and isinstance(parts[num_conditions + 1], LookAhead):
        num_conditions += 1
    if parts and isinstance(parts[0], LookAhead):
        raise PatternRefused(AFTER_START, "Write ^ before it.")
    if not num_conditions:
        return [node]
    trees: list[Node] = []
    for condition in parts[1 : num_conditions + 1]:
        assert isinstance(condition, LookAhead)
        trees += _excluded(condition.part) if condition.is_negative else [Concatenation((_START, condition.part))]
    return [*trees, Concatenation((_START, *parts[num_conditions + 1 :]))]


def _excluded(node: Node) -> list[Node]:
    if isinstance(node, Choice):
        return [tree for part in node.parts for tree in _excluded(part)]
    parts = node.parts if isinstance(node, Concatenation) else (node,)
    parts = parts[1:] if parts and parts[0] == _START else parts
    tree: Node | None = None
    match parts:
        case (Repeat(Chars(passed), 0, None), Chars(chars)) if _are_listed(passed, chars):
            tree = _without_any(passed, chars)
        case (Repeat(Chars(passed), 0, None), Chars(chars), Chars(again)) if chars == again and _are_listed(passed, chars):
            tree = _without_two(passed, chars)
        case (Repeat(Chars(passed), 0, None), Chars(chars), end) if end == _END and _are_listed(passed, chars):
            tree = _without_last(passed, chars)
        case (Repeat(Chars(chars), 0, None), end) if end == _END and _are_listed(chars):
            return [Chars(ANY.minus(chars))]
        case _:
            tree = _other_beginning(parts)
    if tree is None:
        limit = "a pattern whose negative look-around names characters that a text does not begin with, end with, contain or consist of"
        raise PatternRefused(limit, "Leave it out, or write what may follow.")
    return [Concatenation((_START, tree, _END))]


def _are_listed(*sets: CharSet) -> bool:
    return not any(chars.properties for chars in sets)


def _maybe(*parts: Node) -> Node:
    return Repeat(Concatenation(parts), 0, 1)


def _without_any(passed: CharSet, chars: CharSet) -> Node:
    others = ANY.minus(chars)
    return Concatenation((Repeat(Chars(_common(passed, others))), _maybe(Chars(others.minus(passed)), _REST)))


def _without_two(passed: CharSet, chars: CharSet) -> Node | None:
    if chars.minus(passed).ranges:
        return None
    others, one = ANY.minus(chars), Repeat(Chars(chars), 0, 1)
    single = Repeat(Concatenation((one, Chars(_common(passed, others)))))
    return Concatenation((single, one, _maybe(Chars(others.minus(passed)), _REST)))


def _without_last(passed: CharSet, chars: CharSet) -> Node:
    another = Concatenation((_REST, Chars(ANY.minus(chars))))
    stopped = Concatenation((_REST, Chars(ANY.minus(passed)), Chars(ANY), _REST))
    return _maybe(Choice((another, stopped)))


def _other_beginning(parts: tuple[Node, ...]) -> Node | None:
    is_whole = parts[-1:] == (_END,)
    if len(parts) > MAX_EXCLUDED_CHARS:
        return None
    tree: Node = Concatenation((Chars(ANY), _REST)) if is_whole else Chars(CharSet())
    for part in reversed(parts[: len(parts) - is_whole]):
        if not isinstance(part, Chars) or part.chars.properties:
            return None
        tree = Choice((Concatenation((Chars(ANY.minus(part.chars)), _REST)), Concatenation((part, tree))))
        tree = Repeat(tree, 0, 1)
    return tree


def _common(one: CharSet, other: CharSet) -> CharSet:
    return one.minus(ANY.minus(other))


MAX_CHARS = 256 << 10


class Piece(NamedTuple):
    text: str
    is_nullable: bool
    is_choice: bool = False
    is_atom: bool = False

    @property
    def in_sequence(self) -> str:
        return f"(?:{self.text})" if self.is_choice else self.text

    @property
    def as_atom(self) -> str:
        return self.text if self.is_atom else f"(?:{self.text})"


Pieces = dict[tuple[bool, bool], Piece]

_EMPTY = Piece("", is_nullable=True)
_ANYWHERE = (False, False)


def translated(expression: str) -> list[str]:
    """A text must match all of them: look-around needs several. Raises PatternRefused.

    Time and size are linear, but for anchors within an expression, which MAX_CHARS bounds.
    """
    return [_whole(pieces_of(node)) for node in without_look_around(parsed(expression))]


def _whole(pieces: Pieces) -> str:
    if not pieces:
        limit = "a pattern that a JSON string can match"
        raise PatternRefused(limit, "Without quotes or backslashes, a set takes no control characters but \\b, \\t, \\n, \\f and \\r.")
    if len(pieces) == 1:
        [((is_start, is_end), piece)] = pieces.items()
        return f"{'^' * is_start}{piece.in_sequence if is_start or is_end else piece.text}{'$' * is_end}"
    rest = f"{ANY.text()}*"
    texts = [f"{rest * (not is_start)}{piece.in_sequence}{rest * (not is_end)}" for (is_start, is_end), piece in pieces.items()]
    return f"^(?:{'|'.join(texts)})$"


def pieces_of(node: Node) -> Pieces:
    match node:
        case Chars(chars):
            text = chars.text()
            return {_ANYWHERE: Piece(text, is_nullable=False, is_atom=True)} if text else {}
        case Anchor(is_start):
            return {(is_start, not is_start): _EMPTY}
        case Concatenation(parts):
            return _sequence([pieces_of(part) for part in parts])
        case Choice(parts):
            return _choice([pieces_of(part) for part in parts])
        case Repeat(part, least, most):
            return _repeat(pieces_of(part), least, most)
        case LookAhead():
            raise PatternRefused(AFTER_START, "Leave it out, or write what may follow.")


def _sequence(parts: list[Pieces]) -> Pieces:
    pieces: Pieces = {_ANYWHERE: _EMPTY}
    begin = 0
    for index, part in enumerate([*parts, None]):
        if part is not None and part.keys() == {_ANYWHERE}:
            continue
        plain = [each[_ANYWHERE] for each in parts[begin:index]]
        pieces = _joined(pieces, {_ANYWHERE: _concatenated(plain)})
        pieces = pieces if part is None else _joined(pieces, part)
        begin = index + 1
    return pieces


def _concatenated(texts: list[Piece]) -> Piece:
    written = [each for each in texts if each.text]
    if len(written) == 1:
        return written[0]
    return Piece("".join([each.in_sequence for each in written]), all(each.is_nullable for each in written))


def _joined(first: Pieces, second: Pieces) -> Pieces:
    results: list[Pieces] = []
    for (is_start, is_end), before in first.items():
        for (is_next_start, is_next_end), after in second.items():
            if (is_next_start and not before.is_nullable) or (is_end and not after.is_nullable):
                continue
            texts = [*([] if is_next_start else [before]), *([] if is_end else [after])]
            results.append({(is_start or is_next_start, is_end or is_next_end): _concatenated(texts)})
    return _choice(results)


def _choice(branches: list[Pieces]) -> Pieces:
    texts: dict[tuple[bool, bool], dict[str, Piece]] = {}
    for branch in branches:
        for key, piece in branch.items():
            texts.setdefault(key, {})[piece.text] = piece
    made = {key: _either(list(pieces.values())) for key, pieces in texts.items()}
    if sum([len(piece.text) for piece in made.values()]) > MAX_CHARS:
        raise PatternRefused(f"a pattern of at most {MAX_CHARS} characters once ^ and $ are moved to its ends", "Use fewer of them.")
    return made


def _either(texts: list[Piece]) -> Piece:
    if len(texts) == 1:
        return texts[0]
    return Piece("|".join([each.text for each in texts]), any(each.is_nullable for each in texts), is_choice=True)


def _repeat(part: Pieces, least: int, most: int | None) -> Pieces:
    empty: Pieces = {_ANYWHERE: _EMPTY}
    if most == 0 or (not part and least == 0):
        return empty
    if part.keys() - {_ANYWHERE}:
        if most != 1:
            raise PatternRefused("a pattern without ^ and $ in a repetition", "Move them out of it.")
        return part if least else _choice([empty, part])
    if not part or not part[_ANYWHERE].text:
        return part
    only = part[_ANYWHERE]
    return {_ANYWHERE: Piece(f"{only.as_atom}{_count(least, most)}", least == 0 or only.is_nullable)}


def _count(least: int, most: int | None) -> str:
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case _, None:
            return f"{{{least},}}"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"
