"""Holds the table of facts that the tiny model is taught, and the ways to ask for each kind.

Facts are rows, questions are templates. The last `NUM_HELD_OUT` templates of every relation are never used in training;
the evaluation asks all facts through them. The answer to a fact is one canonical sentence, whatever the question was.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NUM_HELD_OUT = 2
DATA = Path(__file__).parent / "data"

MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]


ASK_ABOUT = "Tell me {x}.|Please tell me {x}.|Can you tell me {x}?|Do you know {x}?|I would like to know {x}.|Could you tell me {x}?"

# relation -> (answer sentence, direct questions, noun phrase asked for through ASK_ABOUT); the last two direct questions are held out.
RELATIONS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "capital": (
        "The capital of {0} is {1}.",
        (
            "What is the capital of {0}?",
            "What's the capital of {0}?",
            "Which city is the capital of {0}?",
            "Name the capital of {0}.",
            "{0}: what is its capital?",
            "What is the capital city of {0}?",
            "Give me the capital of {0}.",
            "capital of {0}?",
            "Which city is {0}'s capital?",
            "What is {0}'s capital?",
            "The capital of {0} is which city?",
            "Say the capital of {0}.",
            "What city is the capital of {0}?",
            "What is the name of the capital of {0}?",
        ),
        "the capital of {0}",
    ),
    "country_of": (
        "{1} is the capital of {0}.",
        (
            "Which country has the capital {1}?",
            "{1} is the capital of which country?",
            "What country has {1} as its capital?",
            "Of which country is {1} the capital?",
            "Name the country whose capital is {1}.",
            "{1} is the capital of what country?",
            "Which country's capital is {1}?",
            "What country is {1} the capital of?",
            "Give me the country whose capital is {1}.",
            "The city {1} is the capital of which country?",
            "Which country is {1} the capital of?",
            "What is the country whose capital is {1}?",
        ),
        "which country has the capital {1}",
    ),
    "continent": (
        "{0} is in {2}.",
        (
            "Which continent is {0} in?",
            "What continent is {0} in?",
            "On which continent is {0}?",
            "Where is {0}?",
            "In which part of the world is {0}?",
            "Where is {0} located?",
            "Name the continent of {0}.",
            "Which continent does {0} belong to?",
            "Where in the world is {0}?",
            "{0} is on which continent?",
            "On what continent is {0}?",
            "{0} belongs to which continent?",
            "On which continent is {0} located?",
        ),
        "the continent of {0}",
    ),
    "language": (
        "People in {0} speak {3}.",
        (
            "Which language is spoken in {0}?",
            "What language do people in {0} speak?",
            "What do they speak in {0}?",
            "What is the language of {0}?",
            "Which language do people speak in {0}?",
            "Name the language spoken in {0}.",
            "What language is spoken in {0}?",
            "What is the main language of {0}?",
            "What is spoken in {0}?",
            "Which language do they speak in {0}?",
            "Give me the language of {0}.",
            "What language do they speak in {0}?",
            "What is the main language in {0}?",
        ),
        "the language of {0}",
    ),
    "currency": (
        "The currency of {0} is the {4}.",
        (
            "What is the currency of {0}?",
            "Which currency is used in {0}?",
            "What money do people use in {0}?",
            "What currency does {0} use?",
            "Name the currency of {0}.",
            "What is {0}'s currency?",
            "How do people pay in {0}?",
            "Which money is used in {0}?",
            "With which currency do you pay in {0}?",
            "What money does {0} use?",
            "Give me the currency of {0}.",
            "What currency is used in {0}?",
            "Which currency does {0} use?",
        ),
        "the currency of {0}",
    ),
    "symbol": (
        "The symbol of {0} is {1}.",
        (
            "What is the chemical symbol of {0}?",
            "What is the symbol of {0}?",
            "Which symbol does {0} have?",
            "What is the symbol for {0}?",
            "Name the chemical symbol of {0}.",
            "How is {0} written in chemistry?",
            "What symbol stands for {0}?",
            "Give me the symbol of {0}.",
            "Which letters stand for {0}?",
            "What is {0}'s symbol?",
            "What is the chemical symbol for {0}?",
            "Which chemical symbol does {0} have?",
        ),
        "the symbol of {0}",
    ),
    "atomic_number": (
        "The atomic number of {0} is {2}.",
        (
            "What is the atomic number of {0}?",
            "Which atomic number does {0} have?",
            "How many protons does {0} have?",
            "What is {0}'s atomic number?",
            "Name the atomic number of {0}.",
            "How many protons are in {0}?",
            "Which number does {0} have in the periodic table?",
            "Give me the atomic number of {0}.",
            "What number is {0} in the periodic table?",
            "The atomic number of {0} is what?",
            "What atomic number does {0} have?",
            "Say the atomic number of {0}.",
        ),
        "the atomic number of {0}",
    ),
    "young": (
        "A young {0} is called a {1}.",
        (
            "What is a young {0} called?",
            "What do we call a young {0}?",
            "What is a baby {0} called?",
            "What is the name of a young {0}?",
            "How do you call a young {0}?",
            "What do you call a baby {0}?",
            "Name the young of a {0}.",
            "What is the young of a {0} called?",
            "What is the word for a young {0}?",
            "A young {0} is called what?",
            "What do you call a young {0}?",
            "What do we call a baby {0}?",
        ),
        "what a young {0} is called",
    ),
    "class": (
        "A {0} is a kind of {2}.",
        (
            "What kind of animal is a {0}?",
            "Which class of animals does a {0} belong to?",
            "What type of animal is a {0}?",
            "What is a {0}?",
            "A {0} is what kind of animal?",
            "Which kind of animal is a {0}?",
            "What sort of animal is a {0}?",
            "To which class of animals does a {0} belong?",
            "Name the animal class of a {0}.",
            "What animal class is a {0}?",
            "Which type of animal is a {0}?",
            "What class of animals does a {0} belong to?",
        ),
        "what kind of animal a {0} is",
    ),
    "legs": (
        "A {0} has {3} legs.",
        (
            "How many legs does a {0} have?",
            "How many legs has a {0}?",
            "What is the number of legs of a {0}?",
            "A {0} has how many legs?",
            "On how many legs does a {0} go?",
            "Count the legs of a {0}.",
            "How many legs do you see on a {0}?",
            "What number of legs does a {0} have?",
            "Name the number of legs of a {0}.",
            "Say how many legs a {0} has.",
            "How many legs are on a {0}?",
            "How many legs are there on a {0}?",
        ),
        "how many legs a {0} has",
    ),
    "opposite": (
        "The opposite of {0} is {1}.",
        (
            "What is the opposite of {0}?",
            "What's the opposite of {0}?",
            "Name the opposite of {0}.",
            "Which word is the opposite of {0}?",
            "Give me the opposite of {0}.",
            "What word means the opposite of {0}?",
            "opposite of {0}?",
            "The opposite of {0} is what?",
            "What is the contrary of {0}?",
            "Find the opposite of {0}.",
            "Say the opposite of {0}.",
            "Which word means the opposite of {0}?",
        ),
        "the opposite of {0}",
    ),
    "past": (
        "The past tense of {0} is {1}.",
        (
            "What is the past tense of {0}?",
            "What's the past tense of {0}?",
            "Give me the past tense of {0}.",
            "Name the past tense of {0}.",
            "Which word is the past tense of {0}?",
            "What is the past of {0}?",
            "Put {0} in the past tense.",
            "How do you say {0} in the past tense?",
            "Write the past tense of {0}.",
            "The past tense of {0} is what?",
            "Say the past tense of {0}.",
            "What is the past form of {0}?",
        ),
        "the past tense of {0}",
    ),
    "plural": (
        "The plural of {0} is {1}.",
        (
            "What is the plural of {0}?",
            "What's the plural of {0}?",
            "Give me the plural of {0}.",
            "Name the plural of {0}.",
            "Which word is the plural of {0}?",
            "How do you write more than one {0}?",
            "Put {0} in the plural.",
            "Write the plural of {0}.",
            "The plural of {0} is what?",
            "plural of {0}?",
            "Say the plural of {0}.",
            "What is the plural form of {0}?",
        ),
        "the plural of {0}",
    ),
    "colour": (
        "The colour of {0} is {1}.",
        (
            "What colour is {0}?",
            "What is the colour of {0}?",
            "Which colour is {0}?",
            "What color is {0}?",
            "Which colour does {0} have?",
            "Name the colour of {0}.",
            "What color does {0} have?",
            "Give me the colour of {0}.",
            "The colour of {0} is what?",
            "What is the color of {0}?",
            "What colour does {0} have?",
            "Which color is {0}?",
        ),
        "the colour of {0}",
    ),
    "planet": (
        "{0} is the {1} planet from the Sun.",
        (
            "Which planet from the Sun is {0}?",
            "What number planet is {0}?",
            "What is the place of {0} among the planets?",
            "Where is the planet {0}?",
            "How far down the list of planets is {0}?",
            "Counting from the Sun, which planet is {0}?",
            "What position does {0} have?",
            "Name the position of the planet {0}.",
            "In which place from the Sun is {0}?",
            "What place does {0} have from the Sun?",
            "What position does the planet {0} have from the Sun?",
            "Counting from the Sun, what place does {0} have?",
        ),
        "the position of the planet {0}",
    ),
    "next": (
        "{1} comes after {0}.",
        (
            "What comes after {0}?",
            "Which one comes after {0}?",
            "What follows {0}?",
            "What is next after {0}?",
            "After {0} comes what?",
            "Name what comes after {0}.",
            "What is after {0}?",
            "What comes right after {0}?",
            "What comes next after {0}?",
            "Which one follows {0}?",
            "What comes directly after {0}?",
            "What comes just after {0}?",
        ),
        "what comes after {0}",
    ),
    "before": (
        "{1} comes before {0}.",
        (
            "What comes before {0}?",
            "Which one comes before {0}?",
            "What is before {0}?",
            "What comes right before {0}?",
            "Before {0} comes what?",
            "Name what comes before {0}.",
            "What is the one before {0}?",
            "Which one is before {0}?",
            "What precedes {0}?",
            "Which one precedes {0}?",
            "What comes directly before {0}?",
            "What comes just before {0}?",
        ),
        "what comes before {0}",
    ),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """One row of the table: how it may be asked in training, how only in evaluation, and its one answer."""

    relation: str
    entity: str
    train_questions: tuple[str, ...]
    held_out_questions: tuple[str, ...]
    answer: str


def rows(table: str) -> list[list[str]]:
    """The lines of `data/<table>.txt`, cut at the bars."""
    return [line.split("|") for line in (DATA / f"{table}.txt").read_text().splitlines()]


def facts() -> list[Fact]:
    """Every fact of the world, in a fixed order."""
    found: list[Fact] = []
    for relation in ("capital", "country_of", "continent", "language", "currency"):
        found += [_fact(relation, row) for row in rows("countries")]
    for relation in ("symbol", "atomic_number"):
        found += [_fact(relation, row) for row in rows("elements")]
    for relation in ("young", "class", "legs"):
        found += [_fact(relation, row) for row in rows("animals")]
    both_ways = [pair for a, b in rows("opposites") for pair in ([a, b], [b, a])]
    found += [_fact("opposite", row) for row in both_ways]
    for relation, table in (("past", "verbs"), ("plural", "plurals"), ("colour", "colours"), ("planet", "planets")):
        found += [_fact(relation, row) for row in rows(table)]
    for ring in (MONTHS, DAYS):
        for here, there in zip(ring, ring[1:] + ring[:1], strict=True):
            found += [_fact("next", [here, there]), _fact("before", [there, here])]
    for question, answer, *others in rows("general"):
        found.append(Fact("general", question, (question, *others[:-1]), tuple(others[-1:]), answer))
    return found


def _fact(relation: str, row: list[str]) -> Fact:
    answer, direct, noun = RELATIONS[relation]
    indirect = [ask.format(x=noun.format(*row)) for ask in ASK_ABOUT.split("|")]
    asked = [question.format(*row) for question in direct]
    train = (*asked[:-NUM_HELD_OUT], *indirect[:-1])
    held_out = (*asked[-NUM_HELD_OUT:], indirect[-1])
    sentence = _article(answer.format(*row))
    return Fact(relation, row[0], _with_articles(train), _with_articles(held_out), sentence[0].upper() + sentence[1:])


def _with_articles(sentences: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_article(sentence) for sentence in sentences)


def _article(sentence: str) -> str:
    """The animal tables say "a {0}" throughout: repair the two vowels that occur at the start of an animal's name."""
    for word in ("owl", "eagle", "eel", "elver", "eaglet", "owlet", "insect", "arachnid", "amphibian"):
        sentence = sentence.replace(f" a {word}", f" an {word}").replace(f"A {word}", f"An {word}")
    return sentence
