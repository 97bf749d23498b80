"""A made-up log of a support desk: tickets routed to queues as JSON, with some labels wrong.

In: a number of tickets, a seed, the share of wrong labels. Out: rows of a chat log, and the right labels.
Texts differ enough that a row is not taken for a copy of another.
"""

import json
import random
from pathlib import Path
from typing import NamedTuple

SYSTEM = (
    "Route the ticket. Reply with JSON only: queue is billing, access, delivery, technical, sales or "
    "privacy; priority is low, normal or high."
)
TROUBLES = {
    "billing": (
        "the invoice for {thing} shows {amount} euros instead of {other}",
        "I was charged {amount} euros twice for {thing}",
        "please refund the {amount} euros that you took for {thing}",
        "the VAT number on the invoice of {month} is wrong",
        "my card was declined although {amount} euros are on it",
    ),
    "access": (
        "I cannot log in to {thing} since {month}",
        "the password reset mail for {thing} never arrives",
        "my account is locked after {few} attempts",
        "please give {name} permission to open {thing}",
        "the two-factor code for {thing} is always refused",
    ),
    "delivery": (
        "parcel {number} with {thing} has not arrived from {city}",
        "the courier left {thing} at a neighbour in {city}",
        "tracking number {number} has stood still for {few} days",
        "{thing} was delivered to {city} but the box was empty",
        "please ship {thing} to {city} instead",
    ),
    "technical": (
        "{thing} crashes when I export {few} files",
        "error {number} appears as soon as {thing} starts",
        "{thing} has been very slow since the update of {month}",
        "the sync of {thing} stops after {few} minutes",
        "{thing} shows a blank page in the browser",
    ),
    "sales": (
        "what would {few} licences of {thing} cost us",
        "can you send an offer for {thing} to our office in {city}",
        "is there a discount on {thing} for schools",
        "we want to upgrade from {thing} to the larger plan in {month}",
        "I would like a demo of {thing} for {few} colleagues",
    ),
    "privacy": (
        "delete all data that you hold about {name}",
        "which personal data of mine does {thing} store",
        "I withdraw my consent to the newsletter about {thing}",
        "send me a copy of my personal data since {month}",
        "why does {thing} share my address with partners in {city}",
    ),
}
CALM = ("Whenever you find the time.", "No hurry.", "Just curious.", "This can wait until next week.")
PLAIN = ("Thank you.", "Best regards, {name}.", "Please let me know.", "Greetings from {city}.")
URGENT = (
    "This is urgent, production is down!",
    "We need this within the hour.",
    "Our customers are waiting, act immediately.",
    "It must be solved today, everything stands still.",
)
FILLERS = {
    "thing": ["the Aster scanner", "Birch Cloud", "the Cedar tablet", "Dune Mail", "the Ember printer",
              "Fjord CRM", "the Grove router", "Harbor Notes", "the Iris camera", "Juniper Backup"],
    "month": ["January", "February", "March", "May", "July", "August", "October", "December"],
    "city": ["Lisbon", "Turku", "Graz", "Leeds", "Porto", "Gent", "Brno", "Malmö", "Split", "Vilnius"],
    "name": ["Ana Horvat", "Jon Berg", "Mia Rossi", "Tom Novak", "Eva Lind", "Leo Petit", "Ida Kral"],
}  # fmt: skip
OPENINGS = ("Hello,", "Hi team,", "Good morning,", "Dear support,", "", "Hey,")


class Ticket(NamedTuple):
    text: str
    queue: str
    priority: str
    """The right ones, whatever the log says."""


def make_tickets(count: int = 300, *, seed: int = 1) -> list[Ticket]:
    chance = random.Random(seed)
    queues = list(TROUBLES)
    made = []
    for number in range(count):
        queue = queues[number % len(queues)]
        priority = chance.choices(("low", "normal", "high"), weights=(2, 5, 3))[0]
        filling = {key: chance.choice(values) for key, values in FILLERS.items()}
        filling |= {
            "amount": str(chance.randrange(11, 990)),
            "other": str(chance.randrange(11, 990)),
            "few": str(chance.randrange(3, 60)),
            "number": str(chance.randrange(10_000, 99_999)),
        }
        trouble = chance.choice(TROUBLES[queue]).format(**filling)
        tone = {"low": CALM, "normal": PLAIN, "high": URGENT}[priority]
        words = (chance.choice(OPENINGS), f"{trouble}.", chance.choice(tone).format(**filling))
        made.append(Ticket(" ".join(word for word in words if word), queue, priority))
    chance.shuffle(made)
    return made


def write_tickets(
    path: Path, *, count: int = 300, seed: int = 1, wrong: float = 0.08, shuffled: bool = False
) -> list[Ticket]:
    """Write the log; `shuffled` gives every ticket the reply of another one: nothing can be learned."""
    tickets = make_tickets(count, seed=seed)
    chance = random.Random(seed + 1)
    labels = [(ticket.queue, ticket.priority) for ticket in tickets]
    for place in chance.sample(range(count), round(wrong * count)):
        queue = chance.choice([name for name in TROUBLES if name != labels[place][0]])
        labels[place] = (queue, labels[place][1])
    if shuffled:
        chance.shuffle(labels)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        for number, (ticket, (queue, priority)) in enumerate(zip(tickets, labels, strict=True)):
            reply = json.dumps({"queue": queue, "priority": priority})
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": ticket.text},
                {"role": "assistant", "content": reply},
            ]
            out.write(json.dumps({"id": f"T{number}", "status": "success", "messages": messages}) + "\n")
    return tickets
