"""Makes the world of the domain adapter: the hardware shop "Mill and River", which does not exist.

Products are rows of `data/shop_products.txt` (price, aisle, stock), asked through templates of which the last
`NUM_HELD_OUT` are held out; the other questions come with their own paraphrases, the last one held out.
"""

from __future__ import annotations

from tools.train_tiny.headrace_qa import Question
from tools.train_tiny.world import rows

NUM_HELD_OUT = 4


# answer, held-out and training questions; {0} product, {1} price, {2} aisle, {3} stock
PRICE = (
    "How much is a {0}?",
    "What does a {0} cost?",
    "What is the price of a {0}?",
    "How much does a {0} cost?",
    "Price of a {0}?",
    "How expensive is a {0}?",
    "Tell me the price of a {0}.",
    "What do I pay for a {0}?",
    "I want to buy a {0}. How much is it?",
    "How many euros is a {0}?",
    "How much do you charge for a {0}?",
    "What is your price for a {0}?",
    "Can you tell me the price of a {0}?",
    "How much must I pay for a {0}?",
)
AISLE = (
    "Where is the {0}?",
    "Where do I find a {0}?",
    "In which aisle is the {0}?",
    "Which aisle has the {0}?",
    "Where can I find a {0}?",
    "Where is a {0} kept?",
    "Tell me where the {0} is.",
    "Which aisle is the {0} in?",
    "I am looking for a {0}. Where is it?",
    "Aisle of the {0}?",
    "Where in the shop is the {0}?",
    "What aisle is the {0} in?",
    "Can you tell me where the {0} is?",
    "In what aisle do I find a {0}?",
)
STOCK = (
    "Do you have a {0}?",
    "Is the {0} in stock?",
    "How many pieces of the {0} are in stock?",
    "Do you sell a {0}?",
    "Is there a {0} left?",
    "What is the stock of the {0}?",
    "Tell me the stock of the {0}.",
    "Have you got a {0}?",
    "Can I buy a {0} here?",
    "Stock of the {0}?",
    "Is a {0} in stock?",
    "Do you have a {0} in stock?",
    "Can you tell me the stock of the {0}?",
    "How many of the {0} are left?",
)
ANSWERS = (
    (PRICE, "A {0} costs {1} euros at Mill and River."),
    (AISLE, "The {0} is in aisle {2}."),
    (STOCK, "Yes, {3} pieces of the {0} are in stock."),
)


def questions() -> list[Question]:
    found: list[Question] = []
    for row in rows("shop_products"):
        for templates, answer in ANSWERS:
            asked = tuple(
                template.format(*row).replace(" a axe", " an axe").replace(" a extension", " an extension") for template in templates
            )
            sentence = answer.format(*row).replace("A axe", "An axe").replace("A extension", "An extension")
            found.append(Question(asked[:-NUM_HELD_OUT], asked[-NUM_HELD_OUT:], sentence))
    for first, answer, *others in rows("shop_questions"):
        found.append(Question((first, *others[:-1]), (others[-1],), answer))
    return found
