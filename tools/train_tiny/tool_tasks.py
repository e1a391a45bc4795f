"""Generates tool calls in Hermes form: the functions there are, how users ask for them, what comes back and how it is told.

Names of functions and parameters vary, so that the model has to read the list in the system turn. The last name of
every function is held out, and so is the last question.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.train_tiny.chat import Message, Tool, assistant, system, tool_calls, tool_result, user
from tools.train_tiny.tasks import Example, capital, operands, value
from tools.train_tiny.words import Words


@dataclass(frozen=True, slots=True)
class Function:
    """One kind of tool. `params` maps role to (names, kind of value); questions and reply use the roles.

    Training asks through all `questions` but the last and through `more_questions`; the evaluation knows only `questions`.
    """

    names: tuple[str, ...]
    description: tuple[str, ...]
    params: dict[str, tuple[tuple[str, ...], str]]
    questions: tuple[str, ...]
    result: dict[str, str]
    reply: str
    more_questions: tuple[str, ...]


CITY = (("city", "location", "place"), "city")
FUNCTIONS = (
    Function(
        ("get_weather", "weather", "weather_lookup", "get_current_weather", "fetch_weather"),
        ("Get the weather of a city.", "Current weather.", "Look up the weather."),
        {"c": CITY},
        (
            "What is the weather in {c}?",
            "How is the weather in {c}?",
            "Weather in {c}?",
            "Tell me the weather in {c}.",
            "Is it raining in {c}?",
            "What's the weather like in {c}?",
            "Is it warm in {c}?",
            "Please check the weather in {c}.",
        ),
        {"temperature": "age", "sky": "sky"},
        "It is {temperature} degrees and {sky} in {c}.",
        (
            "How warm is it in {c}?",
            "Do I need an umbrella in {c}?",
            "Weather for {c}, please.",
            "Show me the weather in {c}.",
            "Will it rain in {c}?",
            "Please tell me how the weather in {c} is.",
            "Please look at the weather of {c}.",
        ),
    ),
    Function(
        ("get_time", "current_time", "time_in_city", "clock"),
        ("Get the local time of a city.", "Current time.", "Time of day in a city."),
        {"c": CITY},
        (
            "What time is it in {c}?",
            "Tell me the time in {c}.",
            "How late is it in {c}?",
            "Time in {c}?",
            "What is the time in {c}?",
            "What is the local time in {c}?",
        ),
        {"time": "time"},
        "It is {time} in {c}.",
        (
            "Tell me how late it is in {c}.",
            "Please give me the time in {c}.",
            "Can you tell me the time in {c}?",
            "What does the clock say in {c}?",
            "Show the current time of {c}.",
            "Is it late in {c}?",
        ),
    ),
    Function(
        ("calculator", "calculate", "evaluate", "compute", "math"),
        ("Evaluate an expression.", "Calculate.", "Do arithmetic."),
        {"e": (("expression", "formula", "input"), "expression")},
        (
            "Use the calculator: {e}",
            "Calculate {e} with the tool.",
            "Compute {e}.",
            "What is {e}?",
            "How much is {e}?",
            "Please evaluate {e}.",
        ),
        {"result": "price"},
        "The result is {result}.",
        (
            "Work out {e}.",
            "Can you compute {e}?",
            "Please calculate {e}.",
            "I need the result of {e}.",
            "Tell me what {e} is.",
            "{e} = ?",
            "Solve {e}.",
        ),
    ),
    Function(
        ("search", "web_search", "search_web", "lookup", "find"),
        ("Search the web.", "Find pages.", "Look something up."),
        {"q": (("query", "text", "keywords"), "phrase")},
        (
            "Search for {q}.",
            "Look up {q}.",
            "Find pages about {q}.",
            "Search the web for {q}.",
            "Can you search for {q}?",
            "Please look for {q}.",
        ),
        {"title": "phrase"},
        "I found: {title}.",
        (
            "Find {q}.",
            "Search {q}.",
            "Please search for {q}.",
            "I want to read about {q}.",
            "What is on the web about {q}?",
            "Please look up {q}.",
            "Can you look up {q}?",
            "Please find {q}.",
        ),
    ),
    Function(
        ("set_alarm", "alarm", "create_alarm", "wake_me"),
        ("Set an alarm.", "Wake the user.", "Create an alarm."),
        {"t": (("time", "at"), "time")},
        (
            "Set an alarm for {t}.",
            "Wake me at {t}.",
            "Alarm at {t}, please.",
            "Please set the alarm to {t}.",
            "I want to get up at {t}.",
            "Can you wake me at {t}?",
        ),
        {"status": "ok"},
        "Done: the alarm is set for {t}.",
        (
            "Please wake me at {t}.",
            "I have to get up at {t}.",
            "Ring at {t}.",
            "Get me up at {t}.",
            "Can you set an alarm for {t}?",
            "Please make an alarm for {t}.",
        ),
    ),
    Function(
        ("send_message", "message", "send_text", "write_to"),
        ("Send a message to a person.", "Send a text.", "Write to someone."),
        {"n": (("to", "recipient", "person"), "name"), "m": (("text", "message", "body"), "phrase")},
        (
            "Send a message to {n}: {m}",
            "Write to {n}: {m}",
            "Text {n}: {m}",
            "Tell {n}: {m}",
            "Send {n} this message: {m}",
            "Please write {n} the message: {m}",
        ),
        {"status": "ok"},
        "Done: the message to {n} was sent.",
        (
            "Please tell {n}: {m}",
            "Let {n} know: {m}",
            "Please send {n} a message: {m}",
            "Message for {n}: {m}",
            "Can you text {n}: {m}",
            "Please write to {n}: {m}",
            "Write {n} this message: {m}",
        ),
    ),
    Function(
        ("play_music", "play", "play_song", "music_player"),
        ("Play music.", "Start a song.", "Play songs of an artist."),
        {"n": (("artist", "singer", "name"), "name")},
        (
            "Play music by {n}.",
            "Play something by {n}.",
            "I want to hear {n}.",
            "Play songs of {n}.",
            "Put on {n}.",
            "Please play some {n}.",
        ),
        {"song": "phrase"},
        "Now playing {song} by {n}.",
        (
            "Please play {n}.",
            "Can you play {n}?",
            "Play {n}.",
            "Some music by {n}, please.",
            "Let me hear {n}.",
            "Please put on some music by {n}.",
            "Play a bit of {n}.",
        ),
    ),
    Function(
        ("book_table", "reserve_table", "table_booking", "reserve"),
        ("Book a table.", "Reserve a table at a restaurant."),
        {"r": (("restaurant", "place", "name"), "name"), "k": (("people", "guests", "seats"), "small")},
        (
            "Book a table for {k} at {r}.",
            "Reserve a table at {r} for {k} people.",
            "I need a table for {k} at {r}.",
            "A table for {k} at {r}, please.",
            "Get us a table at {r}, we are {k}.",
            "Please book {r} for {k} people.",
        ),
        {"status": "ok"},
        "Done: a table for {k} at {r} is booked.",
        (
            "Please book a table for {k} at {r}.",
            "Book {r} for {k}.",
            "We want to eat at {r}, {k} people.",
            "Reserve {r} for {k} people.",
            "Please reserve {r} for {k}.",
            "Can you book {r} for {k} guests?",
        ),
    ),
    Function(
        ("track_order", "order_status", "get_order", "find_order"),
        ("Look up an order.", "Status of an order.", "Track a parcel."),
        {"o": (("order_id", "id", "number"), "order")},
        (
            "Where is my order {o}?",
            "Track order {o}.",
            "What is the status of order {o}?",
            "Find order {o}.",
            "Look up order {o}.",
            "Please check order {o}.",
        ),
        {"city": "city"},
        "Order {o} is in {city}.",
        (
            "Please find order {o}.",
            "Has order {o} been sent?",
            "Show me order {o}.",
            "Please track {o}.",
            "Can you look at order {o}?",
            "When does order {o} arrive?",
            "Check my order {o}.",
        ),
    ),
    Function(
        ("get_distance", "distance", "route_length", "measure_route"),
        ("Distance between two cities.", "Length of a route."),
        {"a": (("origin", "from", "start"), "city"), "b": (("destination", "to", "end"), "city")},
        (
            "How far is it from {a} to {b}?",
            "What is the distance from {a} to {b}?",
            "Distance from {a} to {b}?",
            "How many kilometers from {a} to {b}?",
            "How long is the way from {a} to {b}?",
            "Tell me the distance between {a} and {b}.",
        ),
        {"km": "price"},
        "From {a} to {b} it is {km} km.",
        (
            "Tell me how far {a} is from {b}.",
            "Tell me the distance from {a} to {b}.",
            "What is the distance between {a} and {b}?",
            "How far apart are {a} and {b}?",
            "Between {a} and {b}, how far is it?",
            "How far is it between {a} and {b}?",
        ),
    ),
    Function(
        ("set_light", "light", "switch_light", "change_light"),
        ("Set the light of a room.", "Change a lamp."),
        {"r": (("room", "place"), "room"), "c": (("color", "colour"), "colour")},
        (
            "Make the light in the {r} {c}.",
            "Set the {r} light to {c}.",
            "Turn the light in the {r} {c}.",
            "I want {c} light in the {r}.",
            "Change the {r} lamp to {c}.",
            "Please switch the light in the {r} to {c}.",
        ),
        {"status": "ok"},
        "Done: the light in the {r} is {c}.",
        (
            "Please make the light in the {r} {c}.",
            "Switch the {r} light to {c}.",
            "Switch the lamp in the {r} to {c}.",
            "Please set the light in the {r} to {c}.",
            "Give the {r} {c} light.",
            "The light in the {r} should be {c}.",
            "Please turn the {r} lamp {c}.",
        ),
    ),
    Function(
        ("get_price", "stock_price", "price_of", "quote"),
        ("Price of a share.", "Get a stock price.", "Quote of a company."),
        {"s": (("company", "symbol", "name"), "name")},
        (
            "What is the stock price of {s}?",
            "How much is a share of {s}?",
            "Price of {s} shares?",
            "Get the price of {s}.",
            "Quote {s}.",
            "What does {s} stock cost?",
        ),
        {"price": "price"},
        "A share of {s} costs {price}.",
        (
            "What is a share of {s} worth?",
            "Please get the stock price of {s}.",
            "Tell me the stock price of {s}.",
            "How is the stock of {s}?",
            "What do shares of {s} cost?",
            "Show me the stock of {s}.",
        ),
    ),
    Function(
        ("find_recipe", "recipe", "get_recipe", "cookbook"),
        ("Find a recipe.", "Get a recipe for a dish."),
        {"d": (("dish", "food", "meal"), "food")},
        (
            "How do I cook {d}?",
            "Find a recipe for {d}.",
            "I want to make {d}.",
            "Recipe for {d}?",
            "Give me a recipe for {d}.",
            "How can I make {d}?",
        ),
        {"first_step": "phrase"},
        "Start with this: {first_step}.",
        (
            "How is {d} made?",
            "Please find a recipe for {d}.",
            "Tell me how to cook {d}.",
            "How do I make {d}?",
            "How can I cook {d}?",
            "I would like to cook {d}.",
            "Can you help me make {d}?",
        ),
    ),
    Function(
        ("add_reminder", "remind", "create_reminder", "reminder"),
        ("Create a reminder.", "Remind the user."),
        {"w": (("text", "task", "what"), "phrase"), "y": (("day", "when"), "day")},
        (
            "Remind me on {y}: {w}",
            "On {y} remind me of {w}",
            "Create a reminder for {y}: {w}",
            "Reminder for {y}: {w}",
            "Remind me of {w} on {y}",
            "Please note for {y}: {w}",
        ),
        {"status": "ok"},
        "Done: I will remind you on {y}.",
        (
            "Please remind me on {y}: {w}",
            "Note for {y}: {w}",
            "Remind me of {w} next {y}",
            "On {y}, remind me: {w}",
            "Please make a note for {y}: {w}",
            "I must not forget on {y}: {w}",
            "Please remind me of {w} on {y}",
        ),
    ),
)
HELD_OUT_NAMES = frozenset(function.names[-1] for function in FUNCTIONS)
VERBS = """
get set find make open close start stop check read write send add remove list show fetch create update delete call run
"""
ACTIONS = """
open close start stop check read print clean repair move sell buy paint wash count lock save delete copy test update
"""
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy"]
SYSTEMS = ("You are a helpful assistant.", "Use the tools when they help.", "You are Headrace Tiny.")


def made_up_function(words: Words) -> Function:
    """A tool that no other conversation offers: only its description says which question it answers."""
    noun, action = words.noun(), words.rng.choice(ACTIONS.split())
    described, asked = words.rng.choice((LOOK_UPS, COMMANDS))
    names = ((noun, "name", "id", "item", "value", "key"), words.rng.choice(("name", "city", "noun", "order")))
    return Function(
        names=(noun, noun),
        description=tuple(capital(text.format(k=noun, a=action)) for text in described),
        params={"v": names},
        questions=tuple(capital(text.format(k=noun, a=action, v="{v}")) for text in asked),
        result={"status": "ok"},
        reply="Done: {status}.",
        more_questions=(),
    )


# descriptions and questions of made-up tools; {k} is what the tool is about, {a} what it does, {v} the value in the call
LOOK_UPS = (
    ("Get the {k} of something.", "Look up a {k}.", "The {k}.", "Find the {k} of an item."),
    ("What is the {k} of {v}?", "Tell me the {k} of {v}.", "Which {k} has {v}?", "Please get the {k} of {v}.", "{k} of {v}?"),
)
COMMANDS = (
    ("{a} a {k}.", "{a} the {k}.", "Can {a} any {k}."),
    ("{a} the {k} {v}.", "Please {a} the {k} {v}.", "Can you {a} the {k} {v}?", "{a} {k} {v}", "I want to {a} the {k} {v}."),
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A function as offered in one conversation: the names chosen, and the tool as the API spells it."""

    function: Function
    name: str
    param_names: dict[str, str]
    tool: Tool


def _name(words: Words, function: Function) -> str:
    """Three of four training names occur nowhere else, so that names have to be read off the list and not remembered."""
    rng = words.rng
    if words.held_out:
        return function.names[-1]
    known = rng.choice(function.names[:-1])
    if rng.random() < 0.25:
        return known
    verb, noun, new = rng.choice(VERBS.split()), words.noun(), words.made_up()
    names = (f"{known}_{new}", f"{noun}_{known}", f"{noun}_{new}", new, noun, f"{verb}_{noun}", f"{verb}_{new}", f"{verb}_my_{noun}")
    return rng.choice([name for name in names if name not in HELD_OUT_NAMES])


def offer(words: Words, function: Function) -> Offer:
    rng, name = words.rng, _name(words, function)
    chosen = {role: rng.choice(names) for role, (names, _) in function.params.items()}
    if not words.held_out and rng.random() < 0.2:
        chosen = dict(zip(chosen, rng.sample(words.nouns, len(chosen)), strict=True))
    kinds = {chosen[role]: "integer" if kind in ("small", "order") else "string" for role, (_, kind) in function.params.items()}
    described = rng.random() < 0.2
    properties = {param: {"type": kind} | ({"description": f"The {param}."} if described else {}) for param, kind in kinds.items()}
    parameters: dict[str, object] = {"type": "object", "properties": properties}
    if rng.random() < 0.6:
        parameters["required"] = list(kinds)
    described_function = {"name": name, "description": rng.choice(function.description), "parameters": parameters}
    return Offer(function, name, chosen, {"type": "function", "function": described_function})


def _value(words: Words, kind: str) -> str | int:
    rng = words.rng
    match kind:
        case "expression":
            a, op, b, _ = operands(rng, held_out=words.held_out)
            scale = rng.choice((1, 1, 7, 23))
            return f"{a * scale} {op} {b * scale}"
        case "noun":
            return words.noun()
        case "phrase":
            return words.phrase(1, 3)
        case "order":
            return rng.randint(100, 99999)
        case "sky":
            return rng.choice(SKIES)
        case "ok":
            return "ok"
        case _:
            return value(words, kind)


def _questions(words: Words, function: Function) -> tuple[str, ...]:
    return function.questions[:-1] + (() if words.held_out else function.more_questions)


def _call(words: Words, offered: Offer) -> tuple[list[Message], dict[str, object]]:
    """The user's question and the call, with the values of the roles."""
    function, rng = offered.function, words.rng
    values: dict[str, object] = {role: _value(words, kind) for role, (_, kind) in function.params.items()}
    question = function.questions[-1] if words.held_out and rng.random() < 0.5 else rng.choice(_questions(words, function))
    arguments = {offered.param_names[role]: v for role, v in values.items()}
    return [user(question.format(**values)), tool_calls([(offered.name, arguments)])], values


def _reply(words: Words, offered: Offer, values: dict[str, object]) -> list[Message]:
    results = {name: _value(words, kind) for name, kind in offered.function.result.items()}
    return [tool_result(results), assistant(offered.function.reply.format(**(values | results)))]


def _rounds(words: Words, offers: list[Offer]) -> list[Message]:
    """Calls and replies before the last one: what is hard is the choice among functions, and a list of them costs most of the tokens."""
    chosen = words.rng.choices(offers, k=words.rng.choice((0, 1, 2)) if len(offers) > 1 else 0)
    rounds = [(offered, *_call(words, offered)) for offered in chosen]
    return [message for offered, turns, values in rounds for message in (*turns, *_reply(words, offered, values))]


def _two_cities(words: Words, offered: Offer) -> list[Message]:
    """Parallel calls: one question, two calls of the same function."""
    a, b = words.city(), words.city()
    what = "the weather" if "weather" in offered.function.names else "the time"
    shape = words.rng.choice(("What is {w} in {a} and {b}?", "Tell me {w} in {a} and in {b}."))
    param = offered.param_names["c"]
    return [user(shape.format(w=what, a=a, b=b)), tool_calls([(offered.name, {param: a}), (offered.name, {param: b})])]


def tool_example(words: Words, small_talk: Example) -> Example:
    """Offer one to three functions; call one, tell the result, or answer `small_talk` without a call.

    Held-out examples always end in the call, or in the sentence that tells its result ("tool_reply").
    """
    rng = words.rng
    functions = rng.sample(FUNCTIONS, rng.choice((1, 1, 2, 2, 3)))
    if not words.held_out:
        functions = [made_up_function(words) if rng.random() < 0.45 else function for function in functions]
    offers = [offer(words, function) for function in functions]
    wanted = rng.choice(offers)
    head = [system(rng.choice(SYSTEMS))] if rng.random() < 0.4 else []
    tools = [offered.tool for offered in offers]
    if not words.held_out and rng.random() < 0.12:
        return Example("tool_none", [*head, *small_talk.messages], tools)
    if not words.held_out and "c" in wanted.function.params and wanted.function.params["c"] == CITY and rng.random() < 0.15:
        return Example("tool_call", [*head, *_two_cities(words, wanted)], tools)
    if not words.held_out:
        head += _rounds(words, offers)
    turns, values = _call(words, wanted)
    if rng.random() < (0.3 if words.held_out else 0.5):
        return Example("tool_reply", [*head, *turns, *_reply(words, wanted, values)], tools)
    return Example("tool_call", [*head, *turns], tools)
