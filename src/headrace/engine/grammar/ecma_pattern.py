"""Reads ECMAScript's regular expressions, which `pattern` and `patternProperties` hold, into a small tree.

Characters are code points, as with the flag `u`, and Annex B's leniencies are read: `]` for itself, `\\-`, `[\\w-.]`. Of other dialects,
`(?i)` at the beginning and `(?P<name>...)` are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from headrace.engine.grammar.char_sets import ANY, DIGITS, DOT, SPACE, WORD, CharSet, joined, property_set, with_case
from headrace.engine.grammar.limits import MAX_COUNT

MAX_GROUP_DEPTH = 60

_ESCAPED_SETS = {"d": DIGITS, "w": WORD, "s": SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_COUNT = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_GROUP = re.compile(r"\?(?:(?P<look><?[=!])|P?<[^<>=!()]+>|(?P<on>[ims]*)(?:-(?P<off>[ims]*))?:)")
_FLAGS_FIRST = re.compile(r"\(\?([ims]+)\)")
_HEX = {"x": re.compile(r"([0-9a-fA-F]{2})"), "u": re.compile(r"([0-9a-fA-F]{4})|\{0*([0-9a-fA-F]{1,6})\}")}
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"\{([^{}]*)\}")


class PatternRefused(Exception):
    """given: the part at fault; None for the whole expression"""

    def __init__(self, limit: str, remedy: str = "", given: str | None = None) -> None:
        super().__init__(limit)
        self.limit, self.remedy, self.given = limit, remedy, given


@dataclass(frozen=True, slots=True)
class Chars:
    chars: CharSet


@dataclass(frozen=True, slots=True)
class Concatenation:
    parts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Node
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Anchor:
    is_start: bool


@dataclass(frozen=True, slots=True)
class LookAhead:
    part: Node
    is_negative: bool


Node = Chars | Concatenation | Choice | Repeat | Anchor | LookAhead


def parsed(expression: str) -> Node:
    parser = _Parser(expression)
    tree = parser.choice(0)
    if parser.at < len(expression):
        raise PatternRefused("a regular expression of ECMAScript whose parentheses are balanced")
    return tree


class _Parser:
    """flags: those in force at the position, of "i", "m" and "s" """

    def __init__(self, text: str) -> None:
        self._text = text
        first = _FLAGS_FIRST.match(text)
        self.at = first.end() if first else 0
        self._flags = frozenset(first[1] if first else "")

    def choice(self, depth: int) -> Node:
        if depth > MAX_GROUP_DEPTH:
            raise PatternRefused(f"a regular expression with groups in at most {MAX_GROUP_DEPTH} levels")
        parts = [self._sequence(depth)]
        while self._takes("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.at < len(self._text) and self._text[self.at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _atom(self, depth: int) -> Node:
        char = self._next()
        match char:
            case "(":
                return self._group(depth)
            case "[":
                return Chars(self._class())
            case ".":
                return Chars(ANY if "s" in self._flags else DOT)
            case "^" | "$":
                if "m" in self._flags:
                    raise PatternRefused("a pattern without ^ and $ in groups of the flag m", "Write the line breaks out.")
                return Anchor(char == "^")
            case "\\":
                return Chars(self._escape())
            case "*" | "+" | "?":
                self._refuse(f"in which something stands before {char}", f"Write \\{char} for the character.")
        if char == "{" and _COUNT.match(self._text, self.at - 1):
            self._refuse("in which something stands before a count", "Write \\{ for the character.")
        return Chars(self._cased([_single(ord(char))]))

    def _repeated(self, part: Node) -> Node:
        count = _COUNT.match(self._text, self.at)
        if count:
            self.at = count.end()
            least = _counted(count[1])
            most = least if not count[2] else _counted(count[3]) if count[3] else None
        elif (char := self._text[self.at : self.at + 1]) and char in _QUANTIFIERS:
            self.at += 1
            least, most = _QUANTIFIERS[char]
        else:
            return part
        self._takes("?")
        if isinstance(part, Anchor | LookAhead):
            self._refuse("in which ^, $ and look-around are not repeated", "Leave the count out.")
        if most is not None and least > most:
            self._refuse("whose counts are in order", "Write the smaller one first.")
        return Repeat(part, least, most)

    def _group(self, depth: int) -> Node:
        if self._text[self.at : self.at + 1] != "?":
            return self._closed(depth)
        match = _GROUP.match(self._text, self.at)
        if match is None:
            self._refuse("whose groups are (...), (?:...), (?<name>...), (?i:...) or look-around", "Write another group.")
        self.at = match.end()
        if match["look"] in ("<=", "<!"):
            raise PatternRefused("a pattern without look-behind", "Write what may stand there, or leave it out.")
        if match["look"]:
            return LookAhead(self._closed(depth), match["look"] == "!")
        flags = self._flags
        self._flags = flags.union(match["on"] or "").difference(match["off"] or "")
        part = self._closed(depth)
        self._flags = flags
        return part

    def _closed(self, depth: int) -> Node:
        part = self.choice(depth + 1)
        if not self._takes(")"):
            raise PatternRefused("a regular expression of ECMAScript whose parentheses are balanced")
        return part

    def _class(self) -> CharSet:
        is_excluding = self._takes("^")
        members: list[CharSet] = []
        while not self._takes("]"):
            first = self._class_atom()
            if self._text[self.at : self.at + 1] == "-" and self._text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                members += self._range(first, self._class_atom())
            else:
                members.append(first)
        return self._cased(members, is_excluding=is_excluding)

    def _range(self, first: CharSet, last: CharSet) -> list[CharSet]:
        begin, end = _point(first), _point(last)
        if begin is None or end is None:
            return [first, _single(ord("-")), last]
        if begin > end:
            self._refuse("whose ranges of characters are in order", "Write the smaller one first, or \\- for the character.")
        return [CharSet.of([(begin, end)])]

    def _class_atom(self) -> CharSet:
        if self.at >= len(self._text):
            self._refuse("whose brackets are closed", "Write \\[ for the character.")
        char = self._next()
        if char != "\\":
            return _single(ord(char))
        if self._takes("b"):
            return _single(8)
        return self._escape(is_in_class=True)

    def _escape(self, *, is_in_class: bool = False) -> CharSet:
        """In a class, `_cased` is applied to the whole."""
        char = self._next()
        if char.lower() in _ESCAPED_SETS:
            chars = _ESCAPED_SETS[char.lower()]
            chars = self._cased([chars]) if char in "wW" else chars
            return chars if char.islower() else ANY.minus(chars)
        if char in "pP":
            return self._property(char)
        single = _single(self._escaped_point(char))
        return single if is_in_class else self._cased([single])

    def _escaped_point(self, char: str) -> int:
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _HEX:
            return self._hex(char)
        if char == "c" and (letter := self._text[self.at : self.at + 1]).isascii() and letter.isalpha():
            self.at += 1
            return ord(letter) % 32
        if char == "0" and not self._text[self.at : self.at + 1].isdigit():
            return 0
        if char in "bB":
            raise PatternRefused("a pattern without word boundaries", "Write what may stand there, or leave it out.")
        if char in "123456789k":
            raise PatternRefused("a pattern without back references", "Write what was matched out, or leave it out.")
        if char in "AZz":
            self._refuse(f"which has no \\{char}", f"Write {'^' if char == 'A' else '$'}.")
        if char.isalnum() and char.isascii():
            self._refuse(f"which has no \\{char} followed by this", "Write the character without a backslash, or as \\u{...}.")
        return ord(char)

    def _hex(self, char: str) -> int:
        match = _HEX[char].match(self._text, self.at)
        point = int(match[1] or match[2], 16) if match else 0
        if match is None or point > 0x10FFFF:
            self._refuse("whose \\x has two and whose \\u four hexadecimal digits, or up to 10FFFF in braces")
        self.at = match.end()
        low = _LOW_SURROGATE.match(self._text, self.at) if char == "u" and match[1] and 0xD800 <= point <= 0xDBFF else None
        if low:
            self.at = low.end()
            return 0x10000 + ((point - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return point

    def _property(self, char: str) -> CharSet:
        match = _PROPERTY.match(self._text, self.at)
        chars = property_set(match[1], is_excluding=char == "P") if match else None
        if match is None or chars is None:
            raise PatternRefused(
                "a pattern whose \\p{...} are general categories, scripts (Script=...), Any, ASCII, Alphabetic, Lowercase, Uppercase, "
                "White_Space, ID_Start and ID_Continue",
                "Write the characters out.",
            )
        self.at = match.end()
        return chars

    def _cased(self, sets: list[CharSet], *, is_excluding: bool = False) -> CharSet:
        cased = [with_case(each) if "i" in self._flags else each for each in sets]
        if None in cased:
            raise PatternRefused("a pattern whose groups of the flag i hold characters of ASCII", "Write both cases out.")
        return joined((each for each in cased if each is not None), is_excluding=is_excluding)

    def _next(self) -> str:
        if self.at >= len(self._text):
            self._refuse("that does not end in a backslash", "Write \\\\ for the character.")
        self.at += 1
        return self._text[self.at - 1]

    def _takes(self, char: str) -> bool:
        is_next = self._text.startswith(char, self.at)
        self.at += len(char) * is_next
        return is_next

    def _refuse(self, limit: str, remedy: str = "") -> NoReturn:
        raise PatternRefused(f"a regular expression of ECMAScript, {limit}", remedy)


def _single(point: int) -> CharSet:
    return CharSet(((point, point),))


def _point(chars: CharSet) -> int | None:
    (first, last), *others = chars.ranges or ((0, 1),)
    return first if first == last and not others and not chars.properties else None


def _counted(digits: str) -> int:
    number = digits.lstrip("0")
    if len(number) > len(str(MAX_COUNT)) or int(digits) > MAX_COUNT:
        raise PatternRefused(f"counts of at most {MAX_COUNT} in a regular expression", "Lower it, or use + or *.", number[:10])
    return int(digits)
