"""Makes the log of the demo: a help-desk agent that answers from numbered sources, with citations.

In: the invented facts and phrasings of `catalogue.py`, and a fixed seed. No network, no clock.
Out, under `logs/` beside this file, the same bytes each time:
  interactions.jsonl  one JSON object per exchange, in the order of time
  PLANTED.json        the line numbers (from 1) of every fault that was put in on purpose

Run it with `python examples/cited_answers/make_log.py`.
"""

import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from catalogue import DOMAINS, Attribute, Domain

SEED = 20240917
HERE = Path(__file__).parent
LONGEST_SOURCES = 175  # characters of all sources together: a small model trains quickly
LONGEST_PROMPT = 300  # characters of the user's turn
LONGEST_ANSWER = 14  # words

SYSTEM = (
    'Answer from the sources in JSON: {"answer": "...", "citations": [n], "refused": false}.'
    " If they do not say: null, [], true."
)

# How many exchanges of each kind there are before any is repeated.
ONE_SOURCE = 370
TWO_SOURCES = 76
OFF_TOPIC = 94  # refused: nothing in the sources is near the question
WRONG_DESK = 36  # refused: a question that another desk could answer
OTHER_THING = 56  # refused: the sources speak of other things of the same desk
OTHER_DETAIL = 10  # refused: the sources speak of the thing, but not of the detail asked for

EXACT_DUPLICATES = 30
REWORDED_LIGHTLY = 45
REWORDED_FREELY = 15

OPENERS = ("Hello, ", "Quick question: ", "A visitor asks: ", "Hi! ", "Good day. ", "One more: ")
# First words that go into lower case inside a sentence; names and "I" are not among them.
PLAIN_WORDS = (
    "What When Where Which How Who Whom Why Do Does Is Are Can May At On From For In Could "
    "Any If The Put Hand Wear Water Bake Serve Bring There We You Old"
)
ASK_INDIRECTLY = (
    "Can you tell me {}?",
    "Could you check {}?",
    "Do you happen to know {}?",
    "I would like to know {}.",
    "Please look up {}.",
)

FAILURES = (
    "Error: upstream request timed out after 30000 ms",
    'Traceback (most recent call last):\n  File "/srv/agent/loop.py", line 88, in step\n'
    "    reply = client.complete(messages)\nTimeoutError: no answer within 30 s",
    "I'm sorry, something went wrong on our side. Please try again later.",
    '{"error": {"type": "rate_limit_exceeded", "message": "Too many requests"}}',
    "HTTP 502 Bad Gateway",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    'Traceback (most recent call last):\n  File "/srv/agent/parse.py", line 31, in read\n'
    "    return json.loads(text)\njson.decoder.JSONDecodeError: Expecting value: line 1 column 1",
    "Apologies, the service is overloaded right now.",
    "Internal server error (500). Reference 7f3a.",
    "Error: context window exceeded: 8192 tokens allowed",
    "<html><body><h1>503 Service Unavailable</h1></body></html>",
    "KeyError: 'choices'",
    "Sorry, I could not reach the search index.",
)

PLACEHOLDERS = (
    "Mock response",
    "TODO",
    "lorem ipsum dolor sit amet",
    "...",
    '{"answer": "TODO", "citations": [1], "refused": false}',
    '{"answer": "Mock response", "citations": [1], "refused": false}',
    "placeholder",
    "This is a mock response for testing.",
    '{"answer": "lorem ipsum", "citations": [1, 2], "refused": false}',
    "<answer goes here>",
    "TODO: call the model",
    "[insert answer]",
    '{"answer": "...", "citations": [], "refused": false}',
    "dummy reply",
    "test test test",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit.",
    '{"answer": "placeholder", "citations": [2], "refused": false}',
    "mock_response_1",
    "FIXME",
    "xxx",
)

REFUSAL = json.dumps({"answer": None, "citations": [], "refused": True})


@dataclass(frozen=True)
class Exchange:
    """One question with its sources and its reply, before it gets a time and a line."""

    domain: Domain
    sources: tuple[str, ...]
    question: str
    reply: str
    other_questions: tuple[str, ...] = ()
    other_reply: str = ""
    rival_reply: str = ""
    status: str = "success"
    finish_reason: str = "stop"
    slow: bool = False

    @property
    def prompt(self) -> str:
        numbered = "\n".join(f"[{n}] {text}" for n, text in enumerate(self.sources, 1))
        return f"Sources:\n{numbered}\n\nQuestion: {self.question}"

    @property
    def refused(self) -> bool:
        return self.reply == REFUSAL


@dataclass
class Planted:
    """A line of the log to be: the exchange, the fault put into it and the row it repeats."""

    exchange: Exchange
    fault: str | None = None
    detail: str | None = None
    repeats: "Planted | None" = None
    line: int = field(default=0, compare=False)


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def answer_json(answer: str, citations: list[int]) -> str:
    return json.dumps({"answer": answer, "citations": sorted(citations), "refused": False})


def lowered(text: str) -> str:
    """The text as it goes on inside a sentence: lower case unless it starts with a name or I."""
    return text[0].lower() + text[1:] if text.split(maxsplit=1)[0] in PLAIN_WORDS.split() else text


class Desk:
    """Builds exchanges for one domain and never asks the same thing twice."""

    def __init__(self, domain: Domain, rng: random.Random) -> None:
        self.domain = domain
        self.rng = rng
        self.things = domain.rows()
        self.open = [(t, a) for t in self.things for a in range(len(domain.attributes))]
        self.unlisted = list(domain.unlisted)
        self.paired: set[tuple[str, str, int, int]] = set()
        rng.shuffle(self.open)
        rng.shuffle(self.unlisted)

    def attribute(self, index: int) -> Attribute:
        return self.domain.attributes[index]

    def fill(self, form: str, thing: str, index: int) -> str:
        subject = self.domain.subject.format(e=thing)
        return form.format(e=thing, v=self.things[thing][index], s=subject)

    def source(self, thing: str, index: int, barred: frozenset[int] = frozenset()) -> str:
        """A source that states one fact, at times with a second one or a remark behind it."""
        text = sentence(self.fill(self.rng.choice(self.attribute(index).sources), thing, index))
        extra = self.rng.random()
        others = [a for a in range(len(self.things[thing])) if a != index and a not in barred]
        if extra < 0.12 and others and ":" not in text:
            second = self.rng.choice(others)
            text = f"{text[:-1]}, and {self.fill(self.attribute(second).also, thing, second)}."
        elif extra < 0.20:
            text = f"{text} {self.rng.choice(self.domain.asides)}"
        return text

    def filler(self, count: int, barred: set[str], like: int | None) -> list[str]:
        """Sources on other things than the barred ones; half of them on the same attribute."""
        free = [t for t in self.things if t not in barred]
        found = []
        for thing in self.rng.sample(free, count):
            if self.rng.random() < 0.12:
                found.append(self.rng.choice(self.domain.asides))
                continue
            index = self.rng.randrange(len(self.domain.attributes))
            if like is not None and self.rng.random() < 0.5:
                index = like
            found.append(self.source(thing, index))
        return list(dict.fromkeys(found))

    def questions(self, thing: str, index: int) -> list[str]:
        """Every way to ask for one fact, in random order."""
        direct = [self.fill(form, thing, index) for form in self.attribute(index).questions]
        indirect = self.fill(self.attribute(index).indirect, thing, index)
        found = [*direct, self.rng.choice(ASK_INDIRECTLY).format(indirect)]
        self.rng.shuffle(found)
        return found

    def opened(self, question: str) -> str:
        if self.rng.random() < 0.2:
            opener = self.rng.choice(OPENERS)
            if opener[-2] in "!.":
                return opener + question
            if question.split(maxsplit=1)[0] in PLAIN_WORDS.split():
                return opener + lowered(question)
        return question

    def mixed(self, needed: list[str], filler: list[str]) -> tuple[tuple[str, ...], list[int]]:
        """All sources in random order, and the numbers under which the needed ones now stand."""
        while len(needed + filler) > 2 and len("".join(needed + filler)) > LONGEST_SOURCES:
            filler = filler[1:]
        sources = needed + filler
        self.rng.shuffle(sources)
        return tuple(sources), [sources.index(text) + 1 for text in needed]

    def one_source(self, extra_sources: tuple[str, ...] = ()) -> Exchange:
        thing, index = self.open.pop()
        needed = [self.source(thing, index)]
        filler = self.filler(self.rng.choice((1, 2, 2, 3)), {thing}, index)
        if extra_sources:
            filler = [*filler[:1], *extra_sources]
        elif self.rng.random() < 0.2:
            other = self.rng.choice([a for a in range(len(self.things[thing])) if a != index])
            filler[-1] = self.source(thing, other, frozenset({index}))
        sources, cited = self.mixed(needed, filler)
        question, *others = self.questions(thing, index)
        forms = [sentence(self.fill(f, thing, index)) for f in self.attribute(index).answers]
        if self.fill(self.attribute(index).indirect, thing, index) in question:
            forms.reverse()  # a roundabout question names the thing: the answer need not
        wrong = self.rng.choice([t for t in self.things if t != thing])
        rival = self.attribute(index).answers[-1].format(e=thing, v=self.things[wrong][index])
        return Exchange(
            self.domain,
            sources,
            self.opened(question),
            answer_json(forms[0], cited),
            tuple(others),
            answer_json(forms[1], cited),
            answer_json(sentence(rival), [cited[0] % len(sources) + 1]),
        )

    def two_sources(self) -> Exchange:
        """Asks for two details of one thing, or for one detail of two things."""
        size = len(self.domain.attributes)
        while True:
            thing = other = self.rng.choice(list(self.things))
            first, second = self.rng.sample(range(size), 2)
            if self.rng.random() < 0.4:
                other = self.rng.choice([t for t in self.things if t != thing])
                second = first
            if (thing, other, first, second) not in self.paired:
                break
        self.paired.add((thing, other, first, second))
        pronoun = "they" if "they" in self.attribute(0).also else "it"
        clause = self.fill(self.attribute(first).indirect, thing, first)
        answer = sentence(self.fill(self.attribute(first).answers[0], thing, first))[:-1]
        if thing == other:
            form = self.attribute(second).indirect
            object_form = "them" if pronoun == "they" else "it"
            also = form.format(s=object_form if form.endswith("{s}") else pronoun)
            tail = f", and {self.fill(self.attribute(second).also, thing, second)}."
        else:
            also = self.fill(self.attribute(second).indirect, other, second)
            text = self.fill(self.attribute(second).answers[0], other, second)
            tail = f"; {lowered(text)}"
        needed = [
            self.source(thing, first, frozenset({second})),
            self.source(other, second, frozenset({first})),
        ]
        filler = self.filler(self.rng.choice((0, 1, 1, 2)), {thing, other}, first)
        sources, cited = self.mixed(needed, filler)
        question = self.rng.choice(ASK_INDIRECTLY).format(f"{clause} and {also}")
        reply = answer_json(answer + tail, cited)
        return Exchange(self.domain, sources, question, reply, (), reply)

    def refused(self, thing: str, needed: list[str], index: int, count: int) -> Exchange:
        like = index if self.rng.random() < 0.3 else None
        sources, _ = self.mixed(needed, self.filler(count, {thing}, like))
        question, *others = self.questions(thing, index)
        question = self.opened(question)
        return Exchange(self.domain, sources, question, REFUSAL, tuple(others), REFUSAL)

    def other_thing(self) -> Exchange:
        thing, index = self.open.pop()
        return self.refused(thing, [], index, self.rng.choice((2, 3, 3)))

    def other_detail(self) -> Exchange:
        thing, index = self.open.pop()
        known = self.rng.choice([a for a in range(len(self.things[thing])) if a != index])
        near = self.source(thing, known, frozenset({index}))
        return self.refused(thing, [near], index, self.rng.choice((1, 2)))

    def wrong_desk(self, other: "Desk") -> Exchange:
        """A question for the other desk that came to this one."""
        thing, index = other.open.pop()
        question, *others = other.questions(thing, index)
        sources, _ = self.mixed([], self.filler(self.rng.choice((2, 3, 3)), set(), None))
        question = self.opened(question)
        return Exchange(self.domain, sources, question, REFUSAL, tuple(others), REFUSAL)

    def off_topic(self) -> Exchange:
        question = self.opened(self.unlisted.pop())
        sources, _ = self.mixed([], self.filler(self.rng.choice((2, 3, 3, 4)), set(), None))
        return Exchange(self.domain, sources, question, REFUSAL, (), REFUSAL)


class Desks:
    """Takes exchanges from the desks in turn and leaves out those that grew too long."""

    def __init__(self, rng: random.Random) -> None:
        self.desks = [Desk(domain, rng) for domain in DOMAINS]
        self.turn = 0
        self.seen: set[str] = set()

    def misdirected(self, desk: Desk) -> Exchange:
        return desk.wrong_desk(desk.rng.choice([d for d in self.desks if d is not desk]))

    def make(self, build: Callable[[Desk], Exchange], count: int) -> list[Exchange]:
        found: list[Exchange] = []
        idle = 0
        while len(found) < count:
            desk = self.desks[self.turn % len(self.desks)]
            self.turn += 1
            try:
                exchange = build(desk)
            except IndexError:  # this desk has nothing left to ask
                idle += 1
                if idle > len(self.desks) * 2 + count:
                    raise RuntimeError("the catalogue is too small for this log") from None
                continue
            words = len(exchange.reply.split()) - len(REFUSAL.split())
            fits = len(exchange.prompt) <= LONGEST_PROMPT and words <= LONGEST_ANSWER
            if fits and len(exchange.sources) >= 2 and exchange.question not in self.seen:
                self.seen.add(exchange.question)
                found.append(exchange)
        return found


def reworded_lightly(question: str, rng: random.Random) -> str:
    """The same question typed once more: a greeting, a thank-you, a contraction, a slip."""
    for opener in OPENERS:
        if question.startswith(opener):
            question = sentence(question.removeprefix(opener))
    words = question.split()
    slip = rng.choice([n for n, word in enumerate(words) if len(word) > 4])
    word = words[slip]
    at = rng.randrange(1, len(word) - 1)
    typo = word[:at] + word[at] + word[at:]
    edits = [
        f"Sorry to ask again: {lowered(question)}",
        f"{question} Thanks!",
        f"{question} Thank you.",
        f"Please: {lowered(question)}",
        f"Hello again. {question}",
        lowered(question).rstrip("?."),
        " ".join([*words[:slip], typo, *words[slip + 1 :]]),
    ]
    for plain, short in (("Where is", "Where's"), ("What is", "What's"), ("Who is", "Who's")):
        if plain in question:
            edits += [question.replace(plain, short)] * 3
    for plain, alike in (("Can I", "May I"), ("How much", "Roughly how much"), ("Is ", "And is ")):
        if question.startswith(plain):
            edits += [question.replace(plain, alike, 1)] * 2
    return rng.choice([edit for edit in edits if edit != question])


def cut_off(reply: str, rng: random.Random) -> str:
    return reply[: rng.randrange(14, len(reply) - 6)]


def invented(rng: random.Random, alphabet: str, length: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(length))


def with_secrets(desks: Desks, rng: random.Random) -> Iterator[Planted]:
    """Three credentials and four personal details; all of them random or from reserved ranges."""
    mixed_case = string.ascii_letters + string.digits
    model_key = "sk" + "-proj-" + invented(rng, mixed_case, 32)
    cloud_key = "AK" + "IA" + invented(rng, string.ascii_uppercase + "234567", 16)
    code_token = "gh" + "p_" + invented(rng, mixed_case, 36)
    in_sources = (
        ("secret", "model API key in a source", f"Chat widget set-up: key {model_key}."),
        ("secret", "cloud access key id in a source", f"Photo backup runs as {cloud_key}."),
        ("personal", "e-mail in a source", "Bookings: r.halvorsen" + "@" + "northquay.example."),
        ("personal", "phone number in a source", "After hours ring +44 20 7946 " + "0183."),
        ("personal", "phone number in a source", "Ask for Ines on (212) 555" + "-0147."),
    )
    for fault, detail, text in in_sources:
        (exchange,) = desks.make(lambda desk, text=text: desk.one_source((text,)), 1)  # type: ignore[misc]
        yield Planted(exchange, fault, detail)
    exchange, asked = desks.make(Desk.one_source, 2)
    reply = json.loads(exchange.reply)
    reply["answer"] += f" (synced with {code_token})"
    yield Planted(replace(exchange, reply=json.dumps(reply)), "secret", "code hosting token in a reply")
    mail = "tamsin.oyelaran" + "@" + "postbox.example"
    yield Planted(
        replace(asked, question=f"{asked.question} Reply to {mail}."),
        "personal",
        "e-mail in a question",
    )


def conversations(desks: Desks, rng: random.Random) -> list[list[Planted]]:
    """Every row of the log, grouped by session and in the order in which the sessions began."""
    clean = [
        *desks.make(Desk.one_source, ONE_SOURCE),
        *desks.make(Desk.two_sources, TWO_SOURCES),
        *desks.make(Desk.off_topic, OFF_TOPIC),
        *desks.make(desks.misdirected, WRONG_DESK),
        *desks.make(Desk.other_thing, OTHER_THING),
        *desks.make(Desk.other_detail, OTHER_DETAIL),
    ]
    rng.shuffle(clean)
    rows = [Planted(exchange) for exchange in clean]
    repeats: list[Planted] = []

    once = rng.sample(rows, EXACT_DUPLICATES + REWORDED_LIGHTLY - 5 + REWORDED_FREELY)
    copied = once[: EXACT_DUPLICATES - 3]
    copied += copied[:3]  # three of them come a third time
    repeats += [Planted(row.exchange, "exact_duplicate", repeats=row) for row in copied]

    rest = once[EXACT_DUPLICATES - 3 :]
    freely = [row for row in rest if row.exchange.other_questions][:REWORDED_FREELY]
    lightly = [row for row in rest if row not in freely][: REWORDED_LIGHTLY - 5]
    lightly += lightly[:5]
    asked = {row.exchange.question for row in rows}
    for row in [*freely, *lightly]:
        question = row.exchange.question
        while question in asked:
            if row in freely:
                question = rng.choice(row.exchange.other_questions)
            else:
                question = reworded_lightly(row.exchange.question, rng)
        asked.add(question)
        reply = row.exchange.other_reply if rng.random() < 0.3 else row.exchange.reply
        again = replace(row.exchange, question=question, reply=reply)
        detail = "asked in other words" if row in freely else "small change of wording"
        repeats.append(Planted(again, "reworded", detail, repeats=row))

    for number, exchange in enumerate(desks.make(Desk.one_source, 3)):
        first = Planted(exchange, "conflicting")
        reply = REFUSAL if number == 0 else exchange.rival_reply
        rows.append(first)
        repeats.append(Planted(replace(exchange, reply=reply), "conflicting", repeats=first))

    failing = [*desks.make(Desk.one_source, 18), *desks.make(Desk.other_thing, 7)]
    for number, exchange in enumerate(failing):
        text = FAILURES[number % len(FAILURES)]
        slow = "timed out" in text or "Timeout" in text
        failed = replace(exchange, reply=text, status="error", slow=slow)
        rows.append(Planted(failed, "failed"))
    mocked = [*desks.make(Desk.one_source, 14), *desks.make(Desk.off_topic, 6)]
    rng.shuffle(mocked)
    for exchange, text in zip(mocked, PLACEHOLDERS, strict=True):
        rows.append(Planted(replace(exchange, reply=text), "placeholder"))
    for number, exchange in enumerate(desks.make(Desk.one_source, 20)):
        reason = "stop" if number % 4 == 3 else "length"
        cut = replace(exchange, reply=cut_off(exchange.reply, rng), finish_reason=reason)
        rows.append(Planted(cut, "truncated", f"finish reason {reason}"))
    rows += with_secrets(desks, rng)
    return in_sessions(rows, repeats, rng)


def in_sessions(rows: list[Planted], repeats: list[Planted], rng: random.Random) -> list[list[Planted]]:
    """One to three rows of a domain make a session; a repeat follows at once or much later."""
    rng.shuffle(rows)
    waiting: dict[str, list[Planted]] = {}
    for row in rows:
        waiting.setdefault(row.exchange.domain.role, []).append(row)
    sessions: list[list[Planted]] = []
    for queue in waiting.values():
        while queue:
            size = rng.choice((1, 1, 2, 2, 3))
            sessions.append(queue[:size])
            del queue[:size]
    starts = {id(session): rng.random() for session in sessions}
    home = {id(row): session for session in sessions for row in session}
    for row in repeats:
        if row.repeats is None:
            raise ValueError("a repeat without an original")
        session = home[id(row.repeats)]
        if row.fault == "reworded" and rng.random() < 0.4:
            session.insert(len(session), row)
            continue
        alone = [row]
        sessions.append(alone)
        starts[id(alone)] = starts[id(session)] + rng.random() * (1 - starts[id(session)])
    return sorted(sessions, key=lambda session: starts[id(session)])


def duration(exchange: Exchange, rng: random.Random) -> int:
    if exchange.slow:
        return rng.randrange(30_000, 30_400)
    if exchange.status == "error":
        return rng.randrange(40, 900)
    return 350 + len(exchange.reply) * rng.randrange(9, 15) + rng.randrange(400)


def dated(sessions: list[list[Planted]], rng: random.Random) -> Iterator[dict[str, object]]:
    """The rows as the log shows them; each row is told its line on the way."""
    now = datetime(2024, 9, 2, 8, 4, 11)
    line = 0
    for number, session in enumerate(sessions, 1):
        now += timedelta(seconds=rng.randrange(60, 2400))
        if now.hour >= 19:
            now = now.replace(hour=8, minute=rng.randrange(20)) + timedelta(days=1)
        for row in session:
            line += 1
            row.line = line
            exchange = row.exchange
            took = duration(exchange, rng)
            yield {
                "id": "req-" + invented(rng, "0123456789abcdef", 10),
                "timestamp": now.isoformat() + "Z",
                "session": f"s-{number:04d}",
                "agent": {"role": exchange.domain.role},
                "model": "teacher-large",
                "status": exchange.status,
                "finish_reason": exchange.finish_reason,
                "duration_ms": took,
                "messages": [
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": exchange.prompt},
                    {"role": "assistant", "content": exchange.reply},
                ],
            }
            now += timedelta(seconds=took // 1000 + rng.randrange(15, 140))


def planted(rows: list[Planted]) -> dict[str, object]:
    """The key to the faults: lines by kind, and for repeats the lines that belong together."""
    faults: dict[str, list[int]] = {}
    groups: dict[str, dict[int, list[int]]] = {}
    details: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row.fault is None:
            continue
        faults.setdefault(row.fault, []).append(row.line)
        if row.detail:
            details.setdefault(row.fault, {}).setdefault(row.detail, []).append(row.line)
        if row.repeats:
            first = row.repeats.line
            groups.setdefault(row.fault, {}).setdefault(first, [first]).append(row.line)
    refused = sum(row.exchange.refused for row in rows)
    return {
        "note": "Lines count from 1. For exact_duplicate and reworded, `faults` names the later"
        " rows; `groups` starts each group with the row they repeat.",
        "rows": len(rows),
        "refused": refused,
        "without_fault": sum(row.fault is None for row in rows),
        "faults": dict(sorted(faults.items())),
        "details": dict(sorted(details.items())),
        "groups": {kind: list(found.values()) for kind, found in sorted(groups.items())},
    }


def main() -> None:
    rng = random.Random(SEED)
    sessions = conversations(Desks(rng), rng)
    log = HERE / "logs" / "interactions.jsonl"
    log.parent.mkdir(exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in dated(sessions, rng)]
    log.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    key = planted([row for session in sessions for row in session])
    text = json.dumps(key, indent=1)
    (log.parent / "PLANTED.json").write_text(text + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
