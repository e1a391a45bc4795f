"""Drafts without a model: what followed the sequence's last tokens where they stood earlier in it (prompt lookup, suffix decoding).

    tokens   the cat sat. then the cat      "the cat" is found at its earlier place by a hash, as in LZ77: `heads` has the
             ~~~~~~~           ~~~~~~~      latest place of each hash, `previous` the one before each place
    draft    sat. then the cat sat. ...     places are compared token by token, so what shares a hash costs time alone

Of places that match equally far the latest is preferred: it is nearest to what is being written, and found first. That it may be so near
that its followers reach the end makes no draft shorter: they go on with themselves.

Sources: prompt lookup decoding, Saxena 2023; SuffixDecoding, Oliaro et al. 2024; the chains of places, RFC 1951.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from headrace.core.plan import Started
from headrace.core.speculation import NGRAM, SpeculativeConfig
from headrace.engine.runner.slots import Ints

MAX_PLACES = 16
"""Earlier places that are compared, the latest first. A longer match further back is not found."""
MIX, MASK, HASH_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1, 64
NOWHERE = -1
NO_DRAFT: Ints = np.zeros(0, dtype=np.int64)


class LookupDrafter:
    """Implements `drafts.Drafter`. Holds 12 to 16 bytes per token of a sequence for which drafts are asked, 4 of others.

    shortest, longest  number of last tokens that are looked for; the places of the longest match are used
    max_matches        number of these places, the latest, whose followers are compared. A token of the draft is the most frequent one, and
                       the draft ends where less than half of the places agree with all of it
    """

    def __init__(self, *, shortest: int, longest: int, max_matches: int) -> None:
        self._shortest, self._longest, self._max_matches = shortest, longest, max_matches
        self._slots: dict[int, _IndexedTokens] = {}

    def start(self, started: Started) -> None:
        self._slots[started.slot] = _IndexedTokens(started.token_ids, self._shortest)

    def end(self, slots: Ints) -> None:
        for slot in slots.tolist():
            self._slots.pop(slot, None)

    def commit(self, slots: Ints, token_ids: Ints) -> None:
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self._slots[slot].tokens.append(token_id)

    def retract(self, slot: int, token_ids: Ints) -> None:
        self._slots[slot].remove_last(len(token_ids))

    def draft(self, slots: Ints, most: Ints) -> Sequence[Ints]:
        pairs = zip(slots.tolist(), most.tolist(), strict=True)
        return [self._draft(self._slots[slot], limit) if limit else NO_DRAFT for slot, limit in pairs]

    def _draft(self, indexed: _IndexedTokens, most: int) -> Ints:
        indexed.catch_up()
        places = indexed.longest_matches(self._longest, self._max_matches)
        if not places:
            return NO_DRAFT
        followers = [indexed.followers(place, most) for place in places]
        is_agreed = followers.count(followers[0]) == len(followers)
        return np.array(followers[0] if is_agreed else _agreed(followers), dtype=np.int64)

    def close(self) -> None:
        self._slots.clear()

    def check(self) -> None:
        for indexed in self._slots.values():
            indexed.check()


def make_lookup(config: SpeculativeConfig) -> LookupDrafter:
    """For the methods `ngram` and `suffix`."""
    if config.method == NGRAM:
        shortest, longest = config.prompt_lookup
        return LookupDrafter(shortest=shortest, longest=longest, max_matches=1)
    return LookupDrafter(shortest=2, longest=16, max_matches=4)


class _IndexedTokens:
    """One sequence's tokens, and the places of its runs of `shortest` tokens: the place of a run is that of its last token.

    heads     [2 ** bits] by hash: the latest place
    previous  [P] for the first P tokens, the place before it of the same hash. Later tokens are not indexed yet: a sequence for which no
              draft is asked costs nothing
    """

    __slots__ = ("_bits", "_heads", "_previous", "_shortest", "tokens")

    def __init__(self, token_ids: array[int], shortest: int) -> None:
        self.tokens, self._shortest = token_ids[:], shortest
        self._bits, self._heads, self._previous = 0, array("i", [NOWHERE]), array("i")

    def longest_matches(self, longest: int, most: int) -> list[int]:
        """Places, the latest first; all tokens are indexed."""
        tokens, previous = self.tokens, self._previous
        last, length = len(tokens) - 1, self._shortest
        place, ending = previous[last] if previous else NOWHERE, tokens[-length:]
        matches: list[int] = []
        for _ in range(MAX_PLACES):
            if place == NOWHERE or (length == longest and len(matches) == most):
                break
            if tokens[place + 1 - length : place + 1] == ending:
                limit, longer = min(longest, place + 1), length
                while longer < limit and tokens[place - longer] == tokens[last - longer]:
                    longer += 1
                if longer > length:
                    length, ending, matches = longer, tokens[-longer:], []
                matches.append(place)
            place = previous[place]
        return matches[:most]

    def followers(self, place: int, count: int) -> array[int]:
        """Followers that reach the end go on with themselves."""
        found = self.tokens[place + 1 : place + 1 + count]
        return found if len(found) == count else (found * count)[:count]

    def remove_last(self, count: int) -> None:
        left = len(self.tokens) - count
        while len(self._previous) > left:
            before, place = self._previous.pop(), len(self._previous)
            if place + 1 >= self._shortest:
                self._heads[self._hash(place)] = before
        del self.tokens[left:]

    def catch_up(self) -> None:
        if len(self.tokens) >= len(self._heads):
            self._bits = len(self.tokens).bit_length()
            self._heads, self._previous = self._built(len(self.tokens))
            return
        heads, previous = self._heads, self._previous
        for place in range(len(previous), len(self.tokens)):
            if place + 1 < self._shortest:
                previous.append(NOWHERE)
            else:
                hashed = self._hash(place)
                previous.append(heads[hashed])
                heads[hashed] = place

    def _hash(self, place: int) -> int:
        """The upper bits of a polynomial of the run's tokens, modulo 2 ** 64."""
        mixed = 0
        for token in self.tokens[place + 1 - self._shortest : place + 1]:
            mixed = (mixed + token) * MIX
        return (mixed & MASK) >> (HASH_BITS - self._bits)

    def _built(self, num_tokens: int) -> tuple[array[int], array[int]]:
        """`heads` and `previous` of the first tokens, all at once: 5 ms for 100,000."""
        tokens, first = np.array(self.tokens[:num_tokens], dtype=np.uint64), self._shortest - 1
        num_runs = max(0, num_tokens - first)
        mixed = np.zeros(num_runs, dtype=np.uint64)
        for token in range(self._shortest):
            mixed = (mixed + tokens[token : token + num_runs]) * np.uint64(MIX)
        hashes = mixed >> np.uint64(HASH_BITS - self._bits)
        ordered = np.sort(hashes << np.uint64(32) | np.arange(first, first + num_runs, dtype=np.uint64))
        hashes, places = ordered >> np.uint64(32), ordered & np.uint64(MASK >> 32)
        is_again = hashes[1:] == hashes[:-1]
        is_last = np.append(~is_again, True)[:num_runs]
        heads, previous = (np.full(size, NOWHERE, dtype=np.int32) for size in (1 << self._bits, num_tokens))
        previous[places[1:][is_again]] = places[:-1][is_again]
        heads[hashes[is_last]] = places[is_last]
        return array("i", heads.tobytes()), array("i", previous.tobytes())

    def check(self) -> None:
        assert len(self._previous) <= len(self.tokens)
        assert (self._heads, self._previous) == self._built(len(self._previous)), "the index has places of other tokens"


def _agreed(followers: list[array[int]]) -> list[int]:
    drafted: list[int] = []
    agreeing = followers
    for place in range(len(followers[0])):
        tokens = [each[place] for each in agreeing]
        token = max(tokens, key=tokens.count)  # of equally many, the latest
        agreeing = [each for each in agreeing if each[place] == token]
        if 2 * len(agreeing) < len(followers):
            break
        drafted.append(token)
    return drafted
