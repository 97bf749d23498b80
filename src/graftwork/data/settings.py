"""How logs become datasets: the `data:` and `models:` parts of graft.yaml, and the condition of `data.keep`.

The condition (`stars >= 3 and lang == "de" or stars missing`) says which rows of a log are used, by their own
fields. It is parsed and never evaluated as code; `and` binds tighter than `or`.
"""

import operator
import os
import re
from datetime import UTC, date, datetime, time
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from graftwork.process.extensions import extension_names
from graftwork.records.base import Record
from graftwork.records.interaction import Interaction
from graftwork.text.redact import EndpointUrl, VariableName, publishable
from graftwork.text.wording import take_figure, take_score

GRAMMAR = "FIELD >= NUMBER (also <=, >, <), FIELD == VALUE (also !=), FIELD missing, joined by `and` and `or`"
NO_NUMBER = "no number"
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_EQUAL = {"==": operator.eq, "!=": operator.ne}
_TOKEN = re.compile(r"""\s*(>=|<=|==|!=|>|<|"[^"]*"|'[^']*'|`[^`]+`|[^\s<>=!"'`]+)""")
_TRUTH = {"true": 1.0, "false": 0.0}
_FIELDS = {
    **{name: name for name in ("status", "session", "domain", "model", "finish_reason", "stage", "reward")},
    **{name: name for name in ("duration_ms", "cost", "prompt_tokens", "reply_tokens")},
    "role": "group",
    "score": "reward",
    "latency_ms": "duration_ms",
}


class FieldTest(NamedTuple):
    """`sign` is None where the field must be missing."""

    field: str
    sign: str | None
    value: str | float | None
    word: str
    """The value as it is written."""


def require_condition(text: str) -> str:
    """Raise a ValueError where the text is not a condition."""
    parse_condition(text)
    return text


@cache
def parse_condition(text: str) -> tuple[tuple[FieldTest, ...], ...]:
    """Alternatives, each of comparisons that must all hold."""
    tokens, end = [], 0
    while match := _TOKEN.match(text, end):
        tokens.append(match[1])
        end = match.end()
    if text[end:].strip():
        raise ValueError(f"{text[end:].strip()[:20]!r} is not understood; a condition is {GRAMMAR}")
    alternatives: list[list[FieldTest]] = [[]]
    while True:
        comparison, tokens = _take_comparison(tokens)
        alternatives[-1].append(comparison)
        if not tokens:
            return tuple(tuple(comparisons) for comparisons in alternatives)
        joint, *tokens = tokens
        if joint == "or":
            alternatives.append([])
        elif joint != "and":
            raise ValueError(f"`and` or `or` must stand before {joint!r}; a condition is {GRAMMAR}")


def _take_comparison(tokens: list[str]) -> tuple[FieldTest, list[str]]:
    if len(tokens) >= 2 and tokens[1] == "missing":
        return FieldTest(tokens[0].strip("`"), None, None, "missing"), tokens[2:]
    if len(tokens) < 3 or tokens[1] not in {*_COMPARE, *_EQUAL} or tokens[0][0] in "\"'<>=!":
        raise ValueError(f"a condition is {GRAMMAR}; found: {' '.join(tokens[:3]) or 'nothing'}")
    field, sign, word, *remaining = tokens
    number = None if word[0] in "\"'" else _TRUTH.get(word, take_figure(word))
    if number is None and sign in _COMPARE:
        raise ValueError(f"`{sign}` compares numbers, and {word} is none; a condition is {GRAMMAR}")
    value = word.strip("\"'") if number is None else number
    return FieldTest(field.strip("`"), sign, value, word), remaining


def find_objection(row: Interaction, condition: str) -> str | None:
    """Return why the row is not kept."""
    objections: list[str] = []
    for comparisons in parse_condition(condition):
        objection = next((why for item in comparisons if (why := _test(row, item))), None)
        if objection is None or objection.startswith(NO_NUMBER):
            return objection
        objections.append(objection)
    return objections[0]


def _test(row: Interaction, item: FieldTest) -> str | None:
    value = getattr(row, _FIELDS[item.field]) if item.field in _FIELDS else None
    value = row.extra.get(item.field) if value is None else value
    if item.sign is None:
        return None if value is None else f"`{item.field}` is not missing"
    if value is None:
        return f"`{item.field}` is missing"
    if item.sign in _COMPARE:
        number = take_score(value)
        if number is None:
            return f"{NO_NUMBER}: `{item.field}` is text, and it is compared with {item.word}"
        holds = _COMPARE[item.sign](number, float(item.value or 0))
    else:
        holds = _EQUAL[item.sign](
            take_score(value) if isinstance(item.value, float) else str(value), item.value
        )
    return None if holds else f"it is not {item.field} {item.sign} {item.word}"


def list_fields(row: Interaction) -> list[str]:
    """The fields that a condition may name and the row has."""
    return [*(name for name, key in _FIELDS.items() if getattr(row, key) is not None), *row.extra]


FormatName = Literal[
    "repaired",
    "otlp",
    "mlflow",
    "langsmith",
    "langfuse",
    "litellm",
    "helicone",
    "openai_stored",
    "claude_code",
    "codex",
    "captured",
    "execution",
    "openai_log",
    "session",
    "chat",
    "sharegpt",
    "preference",
    "alpaca",
    "completion",
]


def _require_format(name: str) -> str:
    """A name that is not built in must be one that an installed package adds."""
    added = extension_names("graftwork.formats")
    if name not in added:
        raise ValueError(f"unknown format; use one of {', '.join((*get_args(FormatName), *added))}")
    return name


class Mapping(Record):
    """Where the values are in an unknown format: dotted paths such as `request.text` or `turns.0.say`.

    Without `reply`, the texts are read by the format of the row, and only the other values by these paths.
    """

    question: str | None = Field(None, description="The text that was asked; or give `messages`.")
    messages: str | None = Field(None, description="A list of turns with role and content.")
    reply: str | None = Field(
        None, description="The text that was answered. Without it, the format of the row has the texts."
    )
    system: str | None = Field(None, description="The system prompt.")
    id: str | None = None
    role: str | None = Field(None, description="The role of the agent, by which figures are grouped.")
    domain: str | None = None
    session: str | None = None
    stage: str | None = None
    status: str | None = None
    finish_reason: str | None = None
    model: str | None = None
    reward: str | None = Field(None, description="A score of the reply: a number, or true and false.")
    split: str | None = Field(None, description="The split of the row in data that is already split.")

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        if self.reply is None and (self.question or self.messages or self.system):
            raise ValueError("a mapping with `question`, `messages` or `system` names `reply` too")
        if self.reply is not None and (self.question is None) == (self.messages is None):
            raise ValueError("a mapping names either `question` or `messages`")
        return self


def _take_moment(value: Any) -> Any:
    """A day is its first moment; a time without a zone is UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("give a date such as 2026-11-15, or a time such as 2026-11-15T08:30Z") from None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if isinstance(value, datetime):
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    return value


Moment = Annotated[datetime, BeforeValidator(_take_moment)]


class CaptureSettings(Record):
    """Which captured exchanges among the logs become rows, and whose replies a test may be graded by.

    Exchanges with negative feedback never become rows as they were served, whatever is set here.
    """

    feedback: Literal["not_negative", "positive"] = Field(
        "not_negative",
        description="`positive` takes only exchanges with positive feedback or a correction; `not_negative` "
        "those without feedback too.",
    )
    negative_below: float = Field(
        0.5, ge=0, le=1, description="Feedback with a score below this is negative, any other is positive."
    )
    releases: tuple[str, ...] = Field(
        (), description="Only what these releases answered: their ids or how those begin, or `base`."
    )
    since: Moment | None = Field(None, description="Only what was served at this date or time or after it.")
    until: Moment | None = Field(None, description="Only what was served before this date or time.")
    sessions: tuple[str, ...] = Field((), description="Only these sessions.")
    skip_sessions: tuple[str, ...] = Field((), description="None of these sessions.")
    positive_confirms: bool = Field(
        False,
        description="Whether positive feedback makes a served reply a reference for tests. It is off because "
        "users praise what the model is good at, so the model would be graded by its own successes; a "
        "correction always counts.",
    )
    traces_confirm: bool = Field(
        False,
        description="Whether replies in traces that programs send to /v1/traces are references for tests, as "
        "logs are. It is off because the holder of a key for traces would write the test.",
    )

    @model_validator(mode="after")
    def _some_time_is_left(self) -> Self:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError("`since` must be before `until`")
        return self


TEACHER_ENGINE = r"^(embedded|llamacpp(/[a-z0-9_]+)?)$"


class TeacherSettings(Record):
    """A model that answers rows again. The key is never written anywhere."""

    url: EndpointUrl | None = Field(
        None, description="An OpenAI-compatible endpoint, up to /v1: https://host/v1. This or `engine`."
    )
    engine: str | None = Field(
        None,
        pattern=TEACHER_ENGINE,
        description="An engine on this machine instead: embedded, or llamacpp with a precision if wanted "
        "(llamacpp/q4_1).",
    )
    model: str = Field(
        min_length=1,
        description="The model to ask there; for an engine a base: a folder, a name on the Hub, or "
        "smollm2-135m-instruct.",
    )
    api_key_env: VariableName | None = Field(
        None, description="The environment variable that holds the key; no key is sent without it."
    )
    max_tokens: int = Field(1024, ge=16, description="The longest answer. A longer one is refused.")
    attempts: int = Field(5, ge=1, le=20, description="Attempts at a request that fails.")
    concurrency: int = Field(4, ge=1, le=64, description="Requests at the same time.")
    requests_per_minute: float | None = Field(None, gt=0, description="The most requests, retries included.")
    price_in: float | None = Field(None, ge=0, description="Dollars for a million prompt tokens.")
    price_out: float | None = Field(None, ge=0, description="Dollars for a million answered tokens.")
    max_cost: float | None = Field(
        None, gt=0, description="Dollars for all answers together, earlier runs included; needs prices."
    )
    max_total_tokens: int | None = Field(
        None, gt=0, description="Tokens for all answers together, earlier runs included."
    )

    @model_validator(mode="after")
    def _has_one_address(self) -> Self:
        if (self.url is None) == (self.engine is None):
            raise ValueError("a teacher has either a url or an engine")
        return self

    @property
    def address(self) -> str:
        """Where the model is asked."""
        return self.url if self.url is not None else f"engine:{self.engine}"


RepairableFault = Literal[
    "truncated",
    "failed_status",
    "claims_success_but_fails",
    "placeholder",
    "empty",
    "broken_call",
    "repeated_call",
]


class RepairSettings(Record):
    """Which rows `graft data repair` lets a teacher answer again, and which answers are accepted."""

    teacher: TeacherSettings | None = Field(None, description="The model that answers.")
    faults: tuple[RepairableFault, ...] = Field(
        get_args(RepairableFault), description="The faults of rows that are answered again."
    )
    samples: int = Field(1, ge=1, le=9, description="Answers to each prompt; see `agreement`.")
    agreement: float = Field(
        0.6,
        ge=0,
        le=1,
        description="With several samples: the answer that agrees best with the others is accepted if its "
        "mean similarity to them is at least this.",
    )
    judge_at_least: float | None = Field(
        None,
        ge=1,
        le=5,
        description="The lowest mark of the judge under evaluate.judge; none is asked without it.",
    )
    augment: tuple[str, ...] = Field((), description="Roles that get new rows from prompts of other roles.")
    augment_to: int = Field(10, ge=1, description="Usable rows that such a role should have.")
    augment_share: float = Field(
        0.2, ge=0, le=0.5, description="The largest share of added rows in all usable rows."
    )


def names_file(pattern: str, name: str) -> bool:
    """Whether the pattern is this file, a folder that it is in, or a glob that matches it."""
    pattern, name = os.path.normpath(pattern), os.path.normpath(name)
    return fnmatchcase(name, pattern) or name.startswith(pattern + os.sep)


class DataSettings(Record):
    """Which rows are kept, what is done to them and how they are split."""

    logs: tuple[str, ...] = Field(
        (),
        description="Log files, folders or globs, relative to the project's folder; `-` is standard input.",
    )
    format: FormatName | Annotated[str, AfterValidator(_require_format)] | None = Field(
        None, description="The format of the rows; detected if not named. Installed packages may add formats."
    )
    mapping: Mapping | None = Field(
        None, description="Where to find the values in rows of an unknown format."
    )
    formats: dict[str, FormatName | Annotated[str, AfterValidator(_require_format)] | Mapping] = Field(
        {},
        description="The format or the mapping of some of the log files, by file, folder or glob; the first "
        "that matches counts. The other files are read by `format` and `mapping`.",
    )
    system_prompt: str | None = Field(
        None, description="The system prompt of every row that has none under `system_prompts`."
    )
    system_prompts: dict[str, str] = Field({}, description="A system prompt for each role of agent.")
    logged_system_prompt: Literal["replace", "keep_after", "drop"] = Field(
        "replace",
        description="What happens to the logged system prompt: if another is given, that replaces it or goes "
        "before it; `drop` leaves it out in any case, so that it is trained away. Tool definitions stay.",
    )
    reasoning: Literal["keep", "drop"] = Field(
        "keep", description="Whether logged reasoning is trained on, in <think> tags before the answer."
    )
    keep_status: tuple[str, ...] = Field(
        ("success", "succeeded", "ok", "completed"),
        description="Rows whose log states another status are dropped. A row without a status is kept.",
    )
    drop_failed: bool = Field(
        True, description="Drop rows with another status, and replies that are error messages in disguise."
    )
    keep: Annotated[str, AfterValidator(require_condition)] | None = Field(
        None,
        description="Use only rows whose fields meet this condition, such as `stars >= 3 or stars missing`: "
        f"{GRAMMAR}. Captured and repaired rows have settings of their own.",
    )
    rated_bad_below: float | None = Field(
        None,
        description="Replies with a score below this are rated bad: 3 on a scale from 1 to 5. Those with a "
        "score of 0 or less always are.",
    )
    score_weights: dict[float, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {},
        description="How often rows are trained on in an epoch, by their score: {1: 0, 3: 0.5, 5: 2}. "
        "Between two scores it is interpolated; rows without a score count once. Rows in the lower half of "
        "this scale are not references for tests.",
    )
    score_pairs: float | None = Field(
        None,
        gt=0,
        description="Make a preference pair of the best and the worst reply to the same prompt where their "
        "scores differ by at least this; the worse one is not a row of its own.",
    )
    drop_rated_bad: bool = Field(
        True,
        description="Drop replies that the log labels bad (`label: false`) or scores 0 or less, or below "
        "`rated_bad_below`. "
        "`false` keeps them as bad replies for `train.objective: kto`; none is a reference for tests.",
    )
    drop_placeholders: bool = Field(True, description="Drop placeholder replies such as 'Mock response'.")
    drop_truncated: bool = Field(True, description="Drop replies that were cut off.")
    drop_broken_calls: bool = Field(
        True,
        description="Drop replies whose tool calls do not parse, name a tool that the prompt does not "
        "define, have arguments that its schema refuses, or repeat a call whose result did not change. "
        "Earlier turns with such calls stay as context, and are not trained on.",
    )
    drop_unmatched_calls: bool = Field(
        False, description="Drop rows whose prompt has tool results without a call, or calls without one."
    )
    redact: bool = Field(True, description="Replace secrets and personal data by placeholders.")
    near_duplicate: float = Field(
        0.85,
        gt=0,
        le=1,
        description="Rows whose question and reply are at least this similar count as duplicates.",
    )
    keep_duplicate: Literal["first", "last", "longest"] = Field(
        "first", description="Which of several equal or nearly equal rows stays."
    )
    conflicts: Literal["keep_last", "drop_all", "keep_all"] = Field(
        "keep_last",
        description="Which replies to the same prompt are kept: the last one logged, none, all.",
    )
    split_by: str = Field(
        "question",
        description="What is never divided: `question` (the same question), `session`, or a key of a row.",
    )
    stratify: Literal["role", "domain", "nothing"] = Field(
        "role", description="What is balanced across splits, as far as groups allow."
    )
    question_similarity: float = Field(
        0.7, gt=0, le=1, description="Questions at least this similar are always in the same split."
    )
    paraphrases: Literal["off", "embedder"] = Field(
        "off",
        description="`embedder` groups questions in other words too; it needs the extra `paraphrases`.",
    )
    validation: float = Field(0.1, ge=0, lt=1, description="The share of question groups for validation.")
    test: float = Field(0.2, ge=0, lt=1, description="The share of question groups held out for evaluation.")
    train_on: Literal["last", "every", "marked"] = Field(
        "last",
        description="The replies of a conversation that are trained on: the last, each in its own row, or "
        "each that the log marks with `weight: 1`. A reply with `weight: 0` is never trained on.",
    )
    max_tokens: int = Field(1024, ge=8, description="Maximum tokens per row; see `overlong`.")
    overlong: Literal["drop", "split_by_turn", "truncate"] = Field(
        "drop",
        description="Rows beyond max_tokens: drop them; make a row of each turn; leave out the oldest turns.",
    )
    pack_tokens: int | None = Field(
        None, ge=8, description="The length of packed sequences; max_tokens if not given."
    )
    seed: int = Field(0, description="The seed of the split assignment.")
    captures: CaptureSettings = Field(
        default_factory=CaptureSettings,
        description="Which rows of captured exchanges are used; `graft data captures` uses the same filter.",
    )
    repair: RepairSettings = Field(
        default_factory=RepairSettings,
        description="How `graft data repair` lets a teacher answer rows again that would be dropped.",
    )

    @model_validator(mode="after")
    def _something_is_left_to_train_on(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation {self.validation} and test {self.test} leave nothing to train on: "
                "together they must stay below 1"
            )
        if len(self.score_weights) == 1:
            raise ValueError("score_weights names the weight of at least two scores")
        if self.pack_tokens is not None and self.pack_tokens < self.max_tokens:
            raise ValueError(
                f"pack_tokens {self.pack_tokens} is below max_tokens {self.max_tokens}: "
                "a row must fit into a sequence"
            )
        return self

    def to_manifest(self) -> dict[str, Any]:
        """The settings as a dataset's manifest states them.

        Left out where nothing is set: datasets of logs without captures keep the names that they had.
        What is repaired is a log of its own: how it was made does not change the dataset.
        """
        stated = publishable(self)
        del stated["repair"]
        if self.captures == CaptureSettings():
            del stated["captures"]
        for name in ("formats", "keep", "rated_bad_below", "score_weights", "score_pairs"):
            if not stated[name]:
                del stated[name]
        return stated


class Keep(Record):
    """Which rows a model is made of; what is not named does not matter."""

    role: tuple[str, ...] = Field((), description="Roles of agents.")
    domain: tuple[str, ...] = ()
    stage: tuple[int, ...] = ()


class ModelSettings(Record):
    """One of the models that a project trains on the same base: the main one, or a specialist."""

    keep: Keep = Field(default_factory=Keep, description="Its own rows; all of them if nothing is named.")
    replay: float = Field(
        0.0, ge=0, lt=1, description="The share of its training rows drawn from the rest, against forgetting."
    )
    curriculum: bool = Field(False, description="Train on the rows in the order of their stages.")
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {}, description="How often rows of a role are trained on in an epoch; 1 if not named."
    )
    rl: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="The share of its training questions set apart for reinforcement learning.",
    )
    repaired: bool = Field(
        True, description="Train on rows that a teacher answered; `false` makes a model to compare with."
    )

    def to_manifest(self) -> dict[str, Any]:
        """The settings as a dataset's manifest states them; `repaired` only where it leaves rows out."""
        stated = publishable(self)
        if self.repaired:
            del stated["repaired"]
        return stated
