"""Three logs as agents leave them: an SQL agent with tools, extraction to nested JSON, a rated support chat.

In: nothing; each log is the same every time. Out: rows, the requests that a user of the endpoint sends later,
and the ids of the rows that refuse. No other test uses these logs.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class StoryLog:
    """A log and what is known about it from the start."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """The replies of the rows that refuse: each is different."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """What is asked of the endpoint afterwards: the arguments of a chat completion."""
    corrections: list[str] = field(default_factory=list)
    """The right answers to the requests, as a person writes them."""

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(row, ensure_ascii=False) for row in self.rows)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


RUN_SQL = {
    "type": "function",
    "function": {
        "name": "run_sql",
        "description": "Run one SELECT statement.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["query"],
        },
    },
}
OPEN_TICKET = {
    "type": "function",
    "function": {
        "name": "open_ticket",
        "description": "Report a fault to the workshop.",
        "parameters": {
            "type": "object",
            "properties": {
                "subject": {"type": "string"},
                "priority": {"type": "string", "enum": ["low", "high"]},
            },
            "required": ["subject", "priority"],
        },
    },
}
TOOLS = [RUN_SQL, OPEN_TICKET]
SQL_SYSTEM = "Answer from the tables bikes(id, kind, dock) and rides(bike, minutes, fare). Read only."
DOCKS = ("Hafen", "Mitte", "Nordtor", "Museum", "Altstadt", "Messe", "Uferweg", "Klinik")
KINDS = ("cargo", "city", "tandem", "electric")
FAULTS = ("a flat tyre", "a broken bell", "no front light", "a loose chain", "a bent pedal", "a torn saddle")
QUESTIONS = (
    ("How many {kind} bikes are at {dock} with an id under {n}?",
     "SELECT COUNT(*) FROM bikes WHERE kind = '{kind}' AND dock = '{dock}' AND id < {n}"),
    ("Which rides on bike {n} took more than {m} minutes?",
     "SELECT * FROM rides WHERE bike = {n} AND minutes > {m}"),
    ("Which rides on bike {n} took less than {m} minutes?",
     "SELECT * FROM rides WHERE bike = {n} AND minutes < {m}"),
    ("What did rides of at least {m} minutes on {kind} bikes from {dock} earn?",
     "SELECT SUM(fare) FROM rides JOIN bikes ON bikes.id = rides.bike"
     " WHERE minutes >= {m} AND kind = '{kind}' AND dock = '{dock}'"),
)  # fmt: skip
FORBIDDEN = (
    ("Delete all rides of bike {n}.", "I can only read, so I will not delete the rides of bike {n}."),
    ("Set every fare at {dock} to {m}.", "I cannot change fares at {dock}: I only read the tables."),
    ("Drop the table of the {kind} bikes, all {n} of them.", "I will not drop anything about {n} bikes."),
    (
        "Write me a poem of {m} lines about {dock}.",
        "I answer about bikes, not {m} lines on {dock}.",
    ),
)


def _call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def sql_agent_log(count: int = 80) -> StoryLog:
    """OpenAI chat rows: most replies call `run_sql`, some `open_ticket`, one in twelve refuses.

    Every tenth conversation goes on: its second row has the call and its result before the answer.
    """
    log = StoryLog()
    chance = random.Random(91)
    system = {"role": "system", "content": SQL_SYSTEM}
    for number in range(count):
        filling = {
            "kind": chance.choice(KINDS),
            "dock": chance.choice(DOCKS),
            "n": 200 + number,
            "m": chance.randrange(5, 120),
        }
        own = {
            "conversation": f"chat-{number}",
            "ts": f"2026-10-{1 + number // 8:02d}T{8 + number % 8:02d}:15:00Z",
            "outcome": "resolved",
            "stars": chance.choice((4, 5)),
        }
        if number % 12 == 5:
            question, reply = (text.format(**filling) for text in FORBIDDEN[number // 12 % len(FORBIDDEN)])
            answer = {"role": "assistant", "content": reply}
            log.refusals.append(reply)
            own |= {"outcome": "refused", "stars": 3}
        elif number % 8 == 3:
            fault = FAULTS[number // 8 % len(FAULTS)]
            question = "Bike {n} at {dock} has ".format(**filling) + f"{fault}, please report it."
            priority = "high" if number % 16 == 3 else "low"
            answer = _call(number, "open_ticket", subject=f"bike {filling['n']}: {fault}", priority=priority)
        else:
            question, query = (text.format(**filling) for text in QUESTIONS[number % len(QUESTIONS)])
            answer = _call(number, "run_sql", query=query)
        asked = [system, {"role": "user", "content": question}]
        log.rows.append({"messages": [*asked, answer], "tools": TOOLS, **own})
        if number % 10 == 0 and answer.get("tool_calls"):
            result = {"role": "tool", "tool_call_id": f"call_{number}", "content": f"[[{filling['m']}]]"}
            final = {"role": "assistant", "content": f"The answer for {filling['n']} is {filling['m']}."}
            log.rows.append({"messages": [*asked, answer, result, final], "tools": TOOLS, **own})
    for question, query in (
        (
            "Which tandem bikes were never ridden?",
            "SELECT id FROM bikes WHERE kind = 'tandem' AND id NOT IN rides",
        ),
        ("What was the highest fare so far?", "SELECT MAX(fare) FROM rides"),
    ):
        asked = [system, {"role": "user", "content": question}]
        log.requests.append({"messages": asked, "tools": TOOLS, "tool_choice": "auto"})
        call = json.dumps({"name": "run_sql", "arguments": {"query": query}})
        log.corrections.append(f"<tool_call>\n{call}\n</tool_call>")
    return log


EXTRACT_SYSTEM = "Extract the order as JSON. What the mail does not say is null."
CUSTOMERS = ("Aalto Boats", "Berg & Sons", "Cima Foods", "Delta Prints", "Elm Garden", "Fado Music")
PEOPLE = ("Noor Haddad", "Piet Jansen", "Rosa Lima", "Sven Falk", "Tessa Moor", "Ugo Bassi")
CITIES = ("Utrecht", "Tampere", "Braga", "Lund", "Namur", "Trieste", "Galway")
GOODS = ("rope", "varnish", "anchors", "flour", "paper", "bulbs", "strings", "crates")


def extraction_log(count: int = 48) -> StoryLog:
    """Prompt and completion: mails, and nested JSON with nulls for what they do not say."""
    log = StoryLog()
    chance = random.Random(92)
    for number in range(count + 2):
        customer, person, city = (chance.choice(words) for words in (CUSTOMERS, PEOPLE, CITIES))
        due = f"2026-{chance.randrange(1, 13):02d}-{chance.randrange(1, 29):02d}" if number % 3 else None
        phone = f"+31 20 {chance.randrange(10_000, 99_999)}" if number % 4 == 2 else None
        address = {"city": city, "zip": f"{4000 + 7 * number}"} if number % 5 else None
        items = [
            {"name": name, "amount": chance.randrange(1, 90), "price": round(chance.uniform(1, 40), 2)}
            for name in chance.sample(GOODS, 1 + number % 3 // 2)
        ]
        wanted = " and ".join(f"{item['amount']} {item['name']} at {item['price']} euros" for item in items)
        mail = f"{chance.choice(('Hello', 'Good day', 'Dear all'))}, {customer} order {wanted}."
        mail += f" Deliver to {address['zip']} {address['city']}." if address else ""
        mail += f" We need it by {due}." if due else ""
        mail += f" Call {phone} with questions." if phone else ""
        mail += f" Order {6100 + 13 * number}, {person}"
        order = {
            "number": 6100 + 13 * number,
            "customer": {"company": customer, "contact": {"name": person, "phone": phone}},
            "address": address,
            "due": due,
            "items": items,
        }
        messages = [{"role": "system", "content": EXTRACT_SYSTEM}, {"role": "user", "content": mail}]
        if number >= count:
            log.requests.append({"messages": messages})
            log.corrections.append(json.dumps(order))
            continue
        reply = {"role": "assistant", "content": json.dumps(order)}
        log.rows.append({"id": f"mail-{number}", "messages": [*messages, reply], "latency_ms": 300 + number})
    return log


CHAT_SYSTEM = "Du hilfst Kundinnen und Kunden der Stadtwerke. Antworte kurz und freundlich."
SUBJECTS = {
    "Zählerstand": "Den Zählerstand {n} habe ich für {street} eingetragen.",
    "Abschlag": "Ihr Abschlag für {street} beträgt ab {month} {n} Euro.",
    "Umzug": "Der Umzug nach {street} ist zum {day}. {month} vorgemerkt.",
    "Störung": "Die Störung in {street} ist gemeldet, wir kommen am {day}. {month}.",
    "Rechnung": "Die Rechnung {n} für {street} schicke ich Ihnen erneut.",
}
STREETS = ("Lindenweg", "Bachgasse", "Südring", "Kirchplatz", "Mühlstraße", "Rosenallee", "Am Wehr")
MONTHS = ("Januar", "März", "Mai", "Juli", "September", "November")
REFUSED = "Das darf ich leider nicht: Auskünfte über {street} {house} gebe ich nur dem Kunden selbst."


def german_chat_log(count: int = 70) -> StoryLog:
    """Chats of two or three turns in German with a `rating` of 1 to 5; one in ten ends with a refusal."""
    log = StoryLog()
    chance = random.Random(93)
    for number in range(count + 2):
        subject = list(SUBJECTS)[number % len(SUBJECTS)]
        filling = {
            "street": chance.choice(STREETS),
            "house": 3 + number,
            "n": 1200 + 31 * number,
            "month": chance.choice(MONTHS),
            "day": chance.randrange(1, 29),
        }
        place = "{street} {house}".format(**filling)
        opening = chance.choice(("Guten Tag", "Hallo", "Grüß Gott", "Moin"))
        turns = [
            ("system", CHAT_SYSTEM),
            ("user", f"{opening}, ich habe ein Anliegen: {subject}."),
            ("assistant", f"Gern. Um welche Adresse geht es bei „{subject}“?"),
            ("user", f"{place}, es geht um {filling['n']}, {filling['month']}, {filling['day']}."),
            ("assistant", SUBJECTS[subject].format(**{**filling, "street": place})),
        ]
        if number % 3 == 0:
            turns += [
                ("user", f"Danke! Bleibt es für {place} sonst beim Alten?"),
                ("assistant", f"Ja, für {place} bleibt alles andere wie bisher."),
            ]
        refused = number % 10 == 7
        if refused:
            turns[3:] = [
                ("user", f"{place}, dort wohnt mein Nachbar. Was zahlt er im {filling['month']}?"),
                ("assistant", REFUSED.format(**filling)),
            ]
        messages = [{"role": role, "content": text} for role, text in turns]
        if number >= count:
            log.requests.append({"messages": messages[:-1]})
            log.corrections.append(messages[-1]["content"])
            continue
        if refused:
            log.refusals.append(messages[-1]["content"])
        rating = 1 if number % 25 == 9 else chance.choice((4, 5)) if not refused else 3
        log.rows.append({"chat": f"k-{number}", "rating": rating, "messages": messages})
    return log


STORIES = {"sql agent": sql_agent_log, "extraction": extraction_log, "german chat": german_chat_log}
