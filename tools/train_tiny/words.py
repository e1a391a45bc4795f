"""Draws names and words for the generated tasks, and splits them by one rule into training and held-out words.

`is_held_out` looks only at the word, so the split exists before anything is generated: a held-out word never appears in
training as something to copy, sort, extract, remember or pass to a tool. Made-up words keep the model from learning the
lists by heart. Half of them are pieces of the vocabulary joined: a token that is never copied in training is not copied
in an answer, and the lists alone leave a third of the tokens out.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence

from tools.train_tiny import world

NAMES = """
Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Karen Leo Maria Nina Oscar Paul Rosa Simon Tina Victor Wendy Alice Bob Clara
Daniel Elena Frank Grace Henry Irene Jack Kate Louis Martha Nora Olga Peter Robert Sarah Thomas Ursula Walter Yara Adam Bella
Chris Diana Eric Fiona George Hannah Ivan Julia Kevin Laura Mark Naomi Oliver Paula Ryan Sophie Tom Vera William Zoe Amir Beth
Cesar Dora Erik Flora Gina Hans Ines Jan Kira Lars Mona Nils Otto Pia Ralf Stella Tara Uwe Vito Wanda Xenia Yves Zara Aisha Bruno
Chloe Dylan Elsa Farid Gloria Harold Isabel Jamal
"""
NOUNS = """
apple river stone window garden bottle candle mirror basket hammer ladder pencil button carpet engine feather bridge castle forest
island lemon melon onion pepper cherry grape olive peach bread cheese butter sugar honey coffee spoon fork plate glass kettle oven
table chair lamp clock phone paper book letter stamp coin ring watch shirt shoe glove scarf jacket pocket belt hat wool cotton
silk leather iron wood brick sand glue nail screw rope wire wheel pump motor pipe valve tank truck train plane boat ship harbor
anchor sail drum flute violin piano guitar trumpet song dance movie camera picture paint brush canvas museum school teacher doctor
farmer baker sailor pilot king queen prince dragon tiger lion zebra monkey rabbit mouse wolf fox bear eagle sparrow pigeon turtle
salmon shark whale spider beetle ant flower rose tulip daisy maple oak pine bush grass leaf root seed mountain valley desert ocean
lake beach cloud storm thunder rain snow ice wind fire smoke ash moon star comet planet rocket robot laser magnet battery cable
screen keyboard printer server router packet token cache block
"""
CITIES = """
Hamburg Munich Lyon Milan Naples Porto Geneva Zurich Basel Antwerp Bruges Bergen Malmo Aarhus Krakow Gdansk Turin Bari Seville
Granada Valencia Bristol Leeds York Oxford Dover Boston Denver Dallas Austin Chicago Seattle Portland Phoenix Houston Miami
Toronto Montreal Calgary Osaka Kyoto Nagoya Busan Pune Mumbai Delhi Karachi Lahore Perth Sydney Hobart Auckland Durban Lagos
Mombasa Fez Alexandria Haifa Izmir Cusco Quito Bogota Rosario
"""
COLOURS = [
    "red",
    "blue",
    "green",
    "yellow",
    "orange",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
    "grey",
    "silver",
    "gold",
    "violet",
    "turquoise",
    "crimson",
    "beige",
    "teal",
    "indigo",
    "magenta",
]
FOODS = [
    "pizza",
    "pasta",
    "soup",
    "rice",
    "curry",
    "salad",
    "sushi",
    "tacos",
    "stew",
    "pancakes",
    "noodles",
    "risotto",
    "lasagna",
    "falafel",
    "burgers",
    "dumplings",
    "waffles",
    "porridge",
    "paella",
    "goulash",
]
JOBS = [
    "teacher",
    "doctor",
    "farmer",
    "baker",
    "sailor",
    "pilot",
    "painter",
    "writer",
    "lawyer",
    "plumber",
    "nurse",
    "cook",
    "driver",
    "dentist",
    "carpenter",
    "singer",
    "actor",
    "tailor",
    "miner",
    "judge",
]

ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "cr",
    "dr",
    "fl",
    "gr",
    "kl",
    "pl",
    "pr",
    "sk",
    "sl",
    "sp",
    "st",
    "tr",
    "th",
    "ch",
    "sh",
]
VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "oo", "ou"]
LETTERS = "eeeeeaaaaiiiooouuttnnssrrllddcchmmppggbbffwwyykvjqxz"
CODAS = ("", "", "", *["n", "r", "l", "s", "t", "m", "k", "x", "nd", "rt", "st", "ck"])


# The short lists need a held-out word each, whatever the hash says.
HELD_OUT_TOO = frozenset(
    ["teal", "indigo", "beige", "turquoise", "risotto", "falafel", "goulash", "paella", "dentist", "miner", "judge", "tailor"]
)


def is_held_out(word: str) -> bool:
    """About one word in eight, decided by its spelling alone."""
    return word in HELD_OUT_TOO or zlib.crc32(word.lower().encode()) % 8 == 0


class Words:
    """A random source of words of one side of the split; `pieces` are the tokenizer's, for training alone."""

    def __init__(self, rng: random.Random, *, held_out: bool, pieces: Sequence[str] = ()) -> None:
        self.rng = rng
        self.pieces = pieces
        self.held_out = held_out
        capitals = [row[1] for row in world.rows("countries")]
        self.names = self._mine(NAMES.split())
        self.nouns = self._mine(NOUNS.split())
        self.cities = self._mine([*CITIES.split(), *capitals])
        self.colours = self._mine(COLOURS)
        self.foods = self._mine(FOODS)
        self.jobs = self._mine(JOBS)

    def _mine(self, words: Iterable[str]) -> list[str]:
        return sorted({word for word in words if is_held_out(word) == self.held_out})

    def made_up(self, *, syllables: int = 0) -> str:
        """A pronounceable word that exists in no list; with `syllables` it is never made of pieces, which real names consist of, too."""
        rng = self.rng
        if self.pieces and not syllables and rng.random() < 0.5:
            return self._joined_pieces()
        if not self.held_out and rng.random() < 0.15:
            return self._letters()
        while True:
            count = syllables or rng.choice((1, 2, 2, 2, 3))
            word = "".join(
                rng.choice(ONSETS) + rng.choice(VOWELS) + (rng.choice(CODAS) if rng.random() < 0.5 else "") for _ in range(count)
            )
            if len(word) > 2 and is_held_out(word) == self.held_out:
                return word

    def _letters(self) -> str:
        """A word of random letters: training alone has them, so that every piece of the vocabulary is copied now and then."""
        while True:
            word = "".join(self.rng.choices(LETTERS, k=self.rng.randint(2, 8)))
            if not is_held_out(word):
                return word

    def _joined_pieces(self) -> str:
        while True:
            word = "".join(self.rng.choices(self.pieces, k=self.rng.choice((1, 2, 2, 3))))
            if not is_held_out(word):
                return word

    def name(self) -> str:
        return self.rng.choice(self.names) if self.rng.random() < 0.6 else self.made_up().capitalize()

    def noun(self) -> str:
        return self.rng.choice(self.nouns) if self.rng.random() < (0.4 if self.pieces else 0.65) else self.made_up()

    def city(self) -> str:
        return self.rng.choice(self.cities) if self.rng.random() < 0.7 else self.made_up().capitalize()

    def colour(self) -> str:
        return self.one_of(self.colours)

    def food(self) -> str:
        return self.rng.choice(self.foods) if self.rng.random() < 0.7 else self.made_up()

    def job(self) -> str:
        return self.one_of(self.jobs)

    def one_of(self, words: list[str]) -> str:
        """A word of a short list; in training every other time any word, so that the value is read and not chosen from the list."""
        if self.held_out or self.rng.random() < 0.5:
            return self.rng.choice(words)
        return self.noun() if self.rng.random() < 0.4 else self.made_up()

    def phrase(self, low: int, high: int) -> str:
        return " ".join(self.noun() for _ in range(self.rng.randint(low, high)))
