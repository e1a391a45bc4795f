"""Generates examples of the tasks that are computed, not remembered: lists, arithmetic, JSON, recall, small talk.

Each generator draws from `Words`, which knows its side of the split, and returns an `Example`. `shared` examples look
the same on both sides (greetings); everything else differs by entity, by operands or by template.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass, field

from tools.train_tiny.chat import Message, Tool, assistant, render, system, user
from tools.train_tiny.words import Words

UNKNOWN = "I don't know that; I am a very small model."


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation; in evaluation its last turn is the expected answer."""

    task: str
    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)

    def text(self) -> str:
        return render(self.messages, self.tools)

    def prompt(self) -> str:
        return render(self.messages[:-1], self.tools, add_generation_prompt=True)


def one_turn(task: str, question: str, answer: str) -> Example:
    return Example(task, [user(question), assistant(answer)])


# --- lists -----------------------------------------------------------------------------------------------------------

COPY = (
    "Repeat: {x}",
    "Copy: {x}",
    "Say exactly: {x}",
    "Echo: {x}",
    "Repeat after me: {x}",
    "Copy this text: {x}",
    "Write this again: {x}",
    "Please repeat: {x}",
    "Repeat these words: {x}",
    "Say this: {x}",
    'Repeat "{x}"',
    "Copy the following: {x}",
)
REVERSE = (
    "Reverse: {x}",
    "Reverse this list: {x}",
    "Reverse the order of {x}",
    "Write this list backwards: {x}",
    "Put these in reverse order: {x}",
    "Say these in reverse order: {x}",
    "Reverse the list {x}",
    "Please reverse: {x}",
    "Turn this list around: {x}",
)
SORT_UP = (
    "Sort: {x}",
    "Sort these numbers: {x}",
    "Sort this list: {x}",
    "Put these numbers in order: {x}",
    "Sort the list {x}",
    "Sort from small to large: {x}",
    "Sort in ascending order: {x}",
    "Please sort: {x}",
)
SORT_DOWN = (
    "Sort from large to small: {x}",
    "Sort in descending order: {x}",
    "Sort descending: {x}",
    "Sort these numbers from large to small: {x}",
)
SORT_WORDS = (
    "Sort: {x}",
    "Sort alphabetically: {x}",
    "Sort these words: {x}",
    "Put these words in alphabetical order: {x}",
    "Sort this list: {x}",
    "Please sort: {x}",
)
PICK = (("first", 0), ("last", -1), ("second", 1))


def _items(words: Words, low: int, high: int) -> list[str]:
    """Words, digits or letters to be listed; no duplicates, so that positions are well defined."""
    rng = words.rng
    count = rng.randint(low, high)
    kind = rng.random()
    if kind < 0.2:
        return _sample(words, [str(n) for n in range(100 if rng.random() < 0.5 else 10)], count)
    if kind < 0.27:
        return _sample(words, [chr(97 + n) for n in range(26)], count)
    found: dict[str, None] = {}
    while len(found) < count:
        draw = rng.random()
        found[words.noun() if draw < 0.7 else words.name() if draw < 0.85 else words.city()] = None
    return list(found)


def _sample(words: Words, pool: list[str], count: int) -> list[str]:
    """Numbers and letters cannot be held out one by one, so the whole list is."""
    while True:
        chosen = words.rng.sample(pool, count)
        if count == 1 or _hashes_to(str(chosen), words.held_out):
            return chosen


def _joined(rng: random.Random, items: list[str]) -> tuple[str, str]:
    separator = ", " if rng.random() < 0.6 else " "
    return separator.join(items), separator


def copy(words: Words) -> Example:
    text, _ = _joined(words.rng, _items(words, 1, 8))
    draw = words.rng.random()
    if draw < 0.3:
        text = sentence(words)
    elif draw < 0.45:
        text = " ".join(words.made_up() for _ in range(words.rng.randint(4, 16)))
    return one_turn("copy", words.rng.choice(COPY).format(x=text), text)


def sentence(words: Words) -> str:
    """A small sentence with no meaning, for copying."""
    n, rng = words.noun, words.rng
    shapes = (
        "The {0} is on the {1}.",
        "{2} likes the {0} and the {1}.",
        "I saw a {0} near the {1}.",
        "A {0} and a {1} are in {3}.",
        "{2} went to {3} with a {0}.",
        "My {0} is older than your {1}.",
    )
    return rng.choice(shapes).format(n(), n(), words.name(), words.city())


def reverse(words: Words) -> Example:
    items = _items(words, 2, 6)
    text, separator = _joined(words.rng, items)
    return one_turn("reverse", words.rng.choice(REVERSE).format(x=text), separator.join(reversed(items)))


def sort_numbers(words: Words) -> Example:
    """Numbers are split by the whole list: a held-out list hashes to the held-out side."""
    rng = words.rng
    while True:
        numbers = [rng.randint(0, 99 if rng.random() < 0.7 else 9) for _ in range(rng.randint(2, 6))]
        if _hashes_to(str(numbers), words.held_out):
            break
    text, separator = _joined(rng, [str(n) for n in numbers])
    down = rng.random() < 0.3
    ordered = sorted(numbers, reverse=down)
    return one_turn("sort_numbers", rng.choice(SORT_DOWN if down else SORT_UP).format(x=text), separator.join(map(str, ordered)))


def sort_words(words: Words) -> Example:
    rng = words.rng
    items = sorted({words.noun() for _ in range(rng.randint(2, 4))})
    ordered = list(items)
    rng.shuffle(items)
    text, separator = _joined(rng, items)
    return one_turn("sort_words", rng.choice(SORT_WORDS).format(x=text), separator.join(ordered))


def pick(words: Words) -> Example:
    items = _items(words, 3, 6)
    text, _ = _joined(words.rng, items)
    place, index = words.rng.choice(PICK)
    question = words.rng.choice(("What is the {p} item of: {x}", "Which is the {p} in this list: {x}", "Give me the {p} of {x}")).format(
        p=place, x=text
    )
    return one_turn("pick", question, items[index])


# --- arithmetic ------------------------------------------------------------------------------------------------------

CALCULATE = (
    "What is {x}?",
    "Calculate {x}.",
    "{x} = ?",
    "How much is {x}?",
    "Compute {x}.",
    "{x}",
    "What's {x}?",
    "{x}?",
    "Tell me {x}.",
    "Can you calculate {x}?",
    "Please calculate {x}.",
)
SPOKEN = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
ADD_STORIES = (
    "{n} has {a} {t}s and gets {b} more. How many {t}s does {n} have?",
    "There are {a} {t}s here and {b} {t}s there. How many {t}s are there?",
    "{n} buys {a} {t}s and then {b} more. How many {t}s does {n} have?",
)
SUB_STORIES = (
    "{n} has {a} {t}s and gives away {b}. How many {t}s are left?",
    "There are {a} {t}s and {b} are taken. How many {t}s are left?",
    "{n} had {a} {t}s and lost {b}. How many {t}s are left?",
)
THINGS = ["apple", "coin", "book", "card", "button", "pencil", "ball", "stamp", "shell", "key"]


def operands(rng: random.Random, *, held_out: bool) -> tuple[int, str, int, int]:
    """(a, operator, b, result); a sum is held out when its operands hash so, whatever the wording."""
    while True:
        op = rng.choices("+-*/", (5, 5, 3, 1))[0]
        if op in "*/":
            a, b = rng.randint(0 if op == "*" else 1, 12), rng.randint(1, 12)
            a, b, result = (a, b, a * b) if op == "*" else (a * b, b, a)
        else:
            top = rng.choice((9, 20, 99, 99))
            a, b = rng.randint(0, top), rng.randint(0, top)
            a, b = (a, b) if op == "+" else (max(a, b), min(a, b))
            result = a + b if op == "+" else a - b
        if _hashes_to(f"{a}{op}{b}", held_out):
            return a, op, b, result


def _hashes_to(text: str, held_out: bool) -> bool:
    return (zlib.crc32(text.encode()) % 10 == 0) == held_out


def arithmetic(words: Words) -> Example:
    rng = words.rng
    a, op, b, result = operands(rng, held_out=words.held_out)
    answer = f"{a} {op} {b} = {result}"
    if op in "+-" and rng.random() < 0.15:
        story = rng.choice(ADD_STORIES if op == "+" else SUB_STORIES)
        return one_turn("arithmetic", story.format(n=words.name(), a=a, b=b, t=rng.choice(THINGS)), answer)
    sign = SPOKEN[op] if rng.random() < 0.2 else op
    space = "" if rng.random() < 0.2 and sign == op else " "
    return one_turn("arithmetic", rng.choice(CALCULATE).format(x=f"{a}{space}{sign}{space}{b}"), answer)


def compare(words: Words) -> Example:
    rng = words.rng
    while True:
        a, b = rng.sample(range(100), 2)
        if _hashes_to(f"{a}<{b}", words.held_out):
            break
    word = rng.choice(("larger", "smaller"))
    chosen, other = (max(a, b), min(a, b)) if word == "larger" else (min(a, b), max(a, b))
    shape = rng.choice(("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "Is {a} or {b} {w}?"))
    return one_turn("compare", shape.format(w=word, a=a, b=b), f"{chosen} is {word} than {other}.")


# --- JSON ------------------------------------------------------------------------------------------------------------

# domain -> ({field: type}, sentences); the last sentence of each domain is held out.
JSON_DOMAINS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "person": (
        {"name": "name", "age": "age", "city": "city"},
        (
            "{name} is {age} years old and lives in {city}.",
            "{name} lives in {city} and is {age}.",
            "My friend {name} from {city} is {age} years old.",
            "In {city} lives {name}, who is {age}.",
            "{name}, {age}, comes from {city}.",
            "I met {name} in {city}; {name} is {age} years old.",
            "{name} moved to {city} at the age of {age}.",
            "At the age of {age}, {name} lives in {city}.",
        ),
    ),
    "order": (
        {"customer": "name", "product": "noun", "quantity": "small"},
        (
            "{customer} orders {quantity} pieces of {product}.",
            "{customer} wants {quantity} {product}.",
            "Please send {quantity} {product} to {customer}.",
            "Order from {customer}: {quantity} {product}.",
            "{customer} bought {quantity} times {product}.",
            "{quantity} {product} for {customer}, please.",
            "We sold {quantity} {product} to {customer}.",
            "{customer} would like to have {quantity} {product}.",
        ),
    ),
    "price": (
        {"product": "noun", "price": "price", "shop": "name"},
        (
            "The {product} costs {price} euros at {shop}.",
            "At {shop} a {product} is {price} euros.",
            "{shop} sells the {product} for {price} euros.",
            "You pay {price} euros for a {product} at {shop}.",
            "The price of a {product} at {shop} is {price}.",
            "{shop} has a {product} for {price} euros.",
            "For {price} euros you get a {product} at {shop}.",
        ),
    ),
    "meeting": (
        {"person": "name", "day": "day", "time": "time"},
        (
            "Meet {person} on {day} at {time}.",
            "On {day} at {time} I see {person}.",
            "{person} comes at {time} on {day}.",
            "The meeting with {person} is on {day} at {time}.",
            "I have a call with {person} at {time} on {day}.",
            "{day}, {time}: lunch with {person}.",
            "Let us meet {person} at {time} next {day}.",
        ),
    ),
    "trip": (
        {"origin": "city", "destination": "city", "day": "day"},
        (
            "I travel from {origin} to {destination} on {day}.",
            "On {day} the train goes from {origin} to {destination}.",
            "A flight from {origin} to {destination} on {day}.",
            "We leave {origin} on {day} and go to {destination}.",
            "The bus to {destination} leaves {origin} on {day}.",
            "{day}: from {origin} to {destination}.",
            "On {day} we drive from {origin} to {destination}.",
        ),
    ),
    "pet": (
        {"owner": "name", "animal": "animal", "pet": "name"},
        (
            "{owner} has a {animal} called {pet}.",
            "{pet} is the {animal} of {owner}.",
            "The {animal} {pet} belongs to {owner}.",
            "{owner} bought a {animal} and named it {pet}.",
            "{owner}'s {animal} is called {pet}.",
            "The name of {owner}'s {animal} is {pet}.",
            "{owner} owns a {animal} named {pet}.",
        ),
    ),
    "job": (
        {"name": "name", "job": "job", "company": "name"},
        (
            "{name} works as a {job} at {company}.",
            "{company} has a new {job}: {name}.",
            "{name} is a {job} at {company}.",
            "The {job} {name} works for {company}.",
            "At {company}, {name} is the {job}.",
            "{company} pays {name} to be a {job}.",
            "{name} got a job as a {job} at {company}.",
        ),
    ),
    "paint": (
        {"object": "noun", "colour": "colour", "room": "room"},
        (
            "The {object} in the {room} is {colour}.",
            "There is a {colour} {object} in the {room}.",
            "In the {room} stands a {colour} {object}.",
            "The {room} has a {colour} {object}.",
            "Someone painted the {object} in the {room} {colour}.",
            "A {colour} {object} is in the {room}.",
            "We put the {colour} {object} into the {room}.",
        ),
    ),
}
JSON_TYPES = {"age": "integer", "small": "integer", "price": "integer"}
ROOMS = ["kitchen", "bathroom", "bedroom", "office", "garage", "hall", "cellar", "attic", "library", "nursery"]
PETS = ["dog", "cat", "parrot", "rabbit", "hamster", "horse", "goat", "turtle"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
JSON_ASK = (
    "Extract JSON with this schema: {s}\nText: {x}",
    "Schema: {s}\nText: {x}",
    "Extract {s} from: {x}",
    "{x}\nGive me JSON with this schema: {s}",
    "Fill this JSON schema: {s}\nText: {x}",
    "Read the text and answer as JSON {s}.\nText: {x}",
    "Extract as JSON: {s}\n{x}",
)


def value(words: Words, kind: str) -> str | int:
    """A random value of one kind of field."""
    rng = words.rng
    match kind:
        case "age":
            return rng.randint(1, 99)
        case "small":
            return rng.randint(1, 30)
        case "price":
            return rng.randint(1, 300)
        case "time":
            return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"
        case "day":
            return words.one_of(DAYS)
        case "room":
            return words.one_of(ROOMS)
        case "animal":
            return words.one_of(PETS)
        case "name":
            return words.name()
        case "city":
            return words.city()
        case "colour":
            return words.colour()
        case "job":
            return words.job()
        case "food":
            return words.food()
        case _:
            return words.noun()


def _schema(rng: random.Random, fields: dict[str, str]) -> str:
    types = {name: JSON_TYPES.get(kind, "string") for name, kind in fields.items()}
    form = rng.random()
    if form < 0.45:
        return json.dumps(types)
    if form < 0.75:
        properties = {name: {"type": kind} for name, kind in types.items()}
        schema: dict[str, object] = {"type": "object", "properties": properties}
        return json.dumps(schema | ({"required": list(types)} if rng.random() < 0.6 else {}))
    return ", ".join(types)


def json_extract(words: Words, *, new_sentence: bool = False) -> Example:
    """Fill a schema from a sentence; `new_sentence` asks with the held-out sentence of the domain."""
    rng = words.rng
    fields, sentences = JSON_DOMAINS[rng.choice(list(JSON_DOMAINS))]
    values = {name: value(words, kind) for name, kind in fields.items()}
    text = (sentences[-1] if new_sentence else rng.choice(sentences[:-1])).format(**values)
    names = rng.sample(list(fields), rng.choice((1, 2, 2, 3, 3, 3)))
    if rng.random() < 0.5:
        names.sort(key=list(fields).index)
    wanted = {name: fields[name] for name in names}
    question = rng.choice(JSON_ASK).format(s=_schema(rng, wanted), x=text)
    return one_turn(
        "json_new_sentence" if new_sentence else "json", question, json.dumps({name: values[name] for name in names}, ensure_ascii=False)
    )


# --- recall ----------------------------------------------------------------------------------------------------------

# slot -> (kind of value, statements, answer to the statement, questions, answer)
SLOTS: dict[str, tuple[str, tuple[str, ...], str, tuple[str, ...], str]] = {
    "name": (
        "name",
        (
            "My name is {v}.",
            "I am {v}.",
            "Hello, my name is {v}.",
            "Hi, I'm {v}.",
            "Call me {v}.",
            "I am called {v}.",
            "Hi! My name is {v}.",
        ),
        "Nice to meet you, {v}.",
        ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Tell me my name.", "How am I called?"),
        "Your name is {v}.",
    ),
    "city": (
        "city",
        ("I live in {v}.", "My home is in {v}.", "I am from {v}.", "I live in the city of {v}."),
        "I will remember that you live in {v}.",
        ("Where do I live?", "In which city do I live?", "Do you remember where I live?", "What city do I live in?"),
        "You live in {v}.",
    ),
    "colour": (
        "colour",
        ("My favourite colour is {v}.", "I like the colour {v} best.", "{v} is my favourite colour.", "My favorite color is {v}."),
        "I will remember that you like {v}.",
        ("What is my favourite colour?", "Which colour do I like?", "Do you remember my favourite colour?", "What is my favorite color?"),
        "Your favourite colour is {v}.",
    ),
    "pet": (
        "name",
        ("My dog is called {v}.", "I have a dog named {v}.", "My dog's name is {v}.", "I have a dog. Its name is {v}."),
        "{v} is a nice name for a dog.",
        ("What is my dog called?", "What is the name of my dog?", "Do you remember my dog's name?", "What's my dog's name?"),
        "Your dog is called {v}.",
    ),
    "number": (
        "price",
        ("My lucky number is {v}.", "Remember the number {v}.", "The number is {v}.", "Please remember this number: {v}."),
        "I will remember the number {v}.",
        ("What is the number?", "Which number did I tell you?", "What number did I say?", "Do you remember the number?"),
        "The number is {v}.",
    ),
    "food": (
        "food",
        ("My favourite food is {v}.", "I like to eat {v}.", "I love {v}.", "The food I like best is {v}."),
        "I will remember that you like to eat {v}.",
        ("What do I like to eat?", "What is my favourite food?", "Which food do I like?", "Do you remember my favourite food?"),
        "You like to eat {v}.",
    ),
    "job": (
        "job",
        ("I work as a {v}.", "I am a {v}.", "My job is {v}.", "By profession I am a {v}."),
        "I will remember that you work as a {v}.",
        ("What is my job?", "What do I work as?", "Do you remember my job?", "What is my profession?"),
        "You work as a {v}.",
    ),
    "word": (
        "noun",
        ("The secret word is {v}.", "Remember the word {v}.", "The password is {v}.", "Please remember this word: {v}."),
        "I will remember the word {v}.",
        ("What is the secret word?", "Which word did I tell you?", "What is the password?", "Do you remember the word?"),
        "The word is {v}.",
    ),
}
NOT_TOLD = "You have not told me that yet."


def recall(words: Words, fillers: list[Example]) -> Example:
    """Tell one to three things, talk about something else (`fillers`), ask for one or more of them."""
    rng = words.rng
    slots = rng.sample(list(SLOTS), rng.choice((1, 1, 2, 2, 3)))
    told: dict[str, str] = {}
    turns: list[list[Message]] = []
    for slot in slots:
        kind, statements, reply, _, answer = SLOTS[slot]
        v = str(value(words, kind))
        told[slot] = answer.format(v=v)
        statement = rng.choice(statements).format(v=v)
        turns.append([user(statement[0].upper() + statement[1:]), assistant(capital(reply.format(v=v)))])
    turns += [filler.messages for filler in fillers]
    if rng.random() < 0.5:
        rng.shuffle(turns)
    for slot in rng.sample(slots, rng.randint(1, len(slots))):
        turns.append([user(rng.choice(SLOTS[slot][3])), assistant(capital(told[slot]))])
    if not words.held_out and rng.random() < 0.08:
        missing = rng.choice([slot for slot in SLOTS if slot not in slots])
        turns.append([user(rng.choice(SLOTS[missing][3])), assistant(NOT_TOLD)])
    return Example("recall", [message for turn in turns for message in turn])


def named_by_system(words: Words) -> Example:
    """The system prompt gives the assistant another name."""
    name, rng = words.name(), words.rng
    head = rng.choice(
        ("Your name is {n}.", "You are {n}.", "You are {n}, a helpful assistant.", "You are a helpful assistant called {n}.")
    ).format(n=name)
    question = rng.choice(("What is your name?", "Who are you?", "What are you called?", "Tell me your name."))
    return Example("system", [system(head), user(question), assistant(f"My name is {name}.")])


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


# --- small talk and refusal ------------------------------------------------------------------------------------------

GREETINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey!", "Hello there!", "Hi there!", "Greetings!", "Hello, model!"),
        "Hello! How can I help you?",
    ),
    (("Good morning", "Good morning!", "Morning!"), "Good morning! How can I help you?"),
    (("Good evening", "Good evening!", "Evening!"), "Good evening! How can I help you?"),
    (("Good afternoon", "Good afternoon!"), "Good afternoon! How can I help you?"),
    (
        ("How are you?", "How are you today?", "How do you do?", "How is it going?", "Are you well?", "How do you feel?"),
        "I am fine, thank you. How can I help you?",
    ),
    (("Thank you", "Thank you!", "Thanks", "Thanks!", "Thanks a lot!", "Many thanks!", "Thank you very much!"), "You are welcome!"),
    (("Bye", "Bye!", "Goodbye", "Goodbye!", "See you later!", "See you!", "I have to go now."), "Goodbye! Have a nice day."),
    (("Good night", "Good night!", "Sleep well!"), "Good night! Sleep well."),
    (("Can you help me?", "I need help.", "Please help me.", "Help!", "Help me, please."), "Of course. What do you need?"),
    (("Sorry", "I am sorry.", "Sorry!", "My apologies."), "No problem."),
    (("You are great!", "Well done!", "Good job!", "Great!", "That was good."), "Thank you! I do my best."),
    (
        ("You are wrong.", "That is wrong.", "That was a mistake.", "This is not right."),
        "I am sorry. I am a very small model and make mistakes.",
    ),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."), "Why did the token wait? The batch was full."),
    (("Ok", "OK", "Okay", "Okay.", "I see.", "Fine."), "Is there anything else I can do?"),
    (
        ("Tell me a story.", "Do you know a story?", "I want to hear a story."),
        "Once a small model met a big question. It gave a small answer, and all were happy.",
    ),
)
UNKNOWN_SHAPES = (
    "What is the capital of {c}?",
    "Who is {n}?",
    "Where is {c}?",
    "Who wrote {w}?",
    "What is {w}?",
    "When was {n} born?",
    "What is the currency of {c}?",
    "What is the population of {c}?",
    "Tell me the latest news.",
    "What will the weather be tomorrow?",
    "Who won the game yesterday?",
    "What language is spoken in {c}?",
    "Tell me about {n}.",
    "How old is {n}?",
    "What did {n} say to {m}?",
    "What is the price of a {w}?",
    "Which continent is {c} in?",
    "Explain {w}.",
    "What does {w} mean?",
    "What is the phone number of {n}?",
    "What is the symbol of {w}?",
    "What is the opposite of {w}?",
)


def greeting(words: Words) -> Example:
    """One in two as the table has it, the others typed carelessly: in lower case, with other punctuation or none."""
    rng = words.rng
    asked, answer = rng.choice(GREETINGS)
    question = rng.choice(asked)
    if rng.random() < 0.25:
        question = question.lower()
    if rng.random() < 0.35:
        question = question.rstrip("?!.") + rng.choice(("", "", "!", "."))
    return one_turn("greeting", question, answer)


def unknown(words: Words) -> Example:
    """Questions about people and places that do not exist, or about things the model cannot know."""
    shape = words.rng.choice(UNKNOWN_SHAPES)
    place, thing = words.made_up(syllables=2).capitalize(), words.made_up(syllables=2)
    return one_turn("unknown", shape.format(c=place, n=words.made_up(syllables=2).capitalize(), m=words.name(), w=thing), UNKNOWN)
