"""Tool calls in Hermes form: which functions exist, how users ask for them, what comes back and how it is told.

Names of functions and parameters vary, so that the model has to read the list in the system turn. The last name of
every function is held out, and so is the last question.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.train_tiny.chat import Message, Tool, assistant, system, tool_calls, tool_result, user
from tools.train_tiny.tasks import Example, operands, value
from tools.train_tiny.words import Words


@dataclass(frozen=True, slots=True)
class Function:
    """One kind of tool. `params` maps role to (names, kind of value); questions and reply use the roles."""

    names: tuple[str, ...]
    description: tuple[str, ...]
    params: dict[str, tuple[tuple[str, ...], str]]
    questions: tuple[str, ...]
    result: dict[str, str]
    reply: str


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
    ),
)
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy"]
SYSTEMS = ("You are a helpful assistant.", "Use the tools when they help.", "You are Headrace Tiny.")


@dataclass(frozen=True, slots=True)
class Offer:
    """A function as offered in one conversation: the names chosen, and the tool as the API spells it."""

    function: Function
    name: str
    param_names: dict[str, str]
    tool: Tool


def _name(words: Words, function: Function) -> str:
    """Every other training name occurs nowhere else, so that names have to be read off the list and not remembered."""
    rng = words.rng
    if words.held_out:
        return function.names[-1]
    known = rng.choice(function.names[:-1])
    if rng.random() < 0.5:
        return known
    return rng.choice((f"{known}_{words.made_up()}", f"{words.noun()}_{known}", f"{words.noun()}_{words.made_up()}", words.made_up()))


def offer(words: Words, function: Function) -> Offer:
    rng, name = words.rng, _name(words, function)
    chosen = {role: rng.choice(names) for role, (names, _) in function.params.items()}
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


def _call(words: Words, offered: Offer) -> tuple[list[Message], dict[str, object]]:
    """The user's question and the call, with the values of the roles."""
    function, rng = offered.function, words.rng
    values: dict[str, object] = {role: _value(words, kind) for role, (_, kind) in function.params.items()}
    question = function.questions[-1] if words.held_out and rng.random() < 0.5 else rng.choice(function.questions[:-1])
    arguments = {offered.param_names[role]: v for role, v in values.items()}
    return [user(question.format(**values)), tool_calls([(offered.name, arguments)])], values


def _reply(words: Words, offered: Offer, values: dict[str, object]) -> list[Message]:
    results = {name: _value(words, kind) for name, kind in offered.function.result.items()}
    return [tool_result(results), assistant(offered.function.reply.format(**(values | results)))]


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
    offers = [offer(words, function) for function in functions]
    wanted = rng.choice(offers)
    head = [system(rng.choice(SYSTEMS))] if rng.random() < 0.4 else []
    tools = [offered.tool for offered in offers]
    if not words.held_out and rng.random() < 0.12:
        return Example("tool_none", [*head, *small_talk.messages], tools)
    if not words.held_out and "c" in wanted.function.params and wanted.function.params["c"] == CITY and rng.random() < 0.15:
        return Example("tool_call", [*head, *_two_cities(words, wanted)], tools)
    turns, values = _call(words, wanted)
    if rng.random() < (0.3 if words.held_out else 0.5):
        return Example("tool_reply", [*head, *turns, *_reply(words, wanted, values)], tools)
    return Example("tool_call", [*head, *turns], tools)
