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
    """`sign` is None if the field must be missing."""

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
        raise ValueError(f"{text[end:].strip()[:20]!r} cannot be parsed; a condition is {GRAMMAR}")
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
            raise ValueError(f"`and` or `or` is missing before {joint!r}; a condition is {GRAMMAR}")


def _take_comparison(tokens: list[str]) -> tuple[FieldTest, list[str]]:
    if len(tokens) >= 2 and tokens[1] == "missing":
        return FieldTest(tokens[0].strip("`"), None, None, "missing"), tokens[2:]
    if len(tokens) < 3 or tokens[1] not in {*_COMPARE, *_EQUAL} or tokens[0][0] in "\"'<>=!":
        raise ValueError(f"a condition is {GRAMMAR}; found: {' '.join(tokens[:3]) or 'nothing'}")
    field, sign, word, *remaining = tokens
    number = None if word[0] in "\"'" else _TRUTH.get(word, take_figure(word))
    if number is None and sign in _COMPARE:
        raise ValueError(f"`{sign}` compares numbers, and {word} is not a number; a condition is {GRAMMAR}")
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

    question: str | None = Field(None, description="The question; or use `messages`.")
    messages: str | None = Field(None, description="A list of turns with role and content.")
    reply: str | None = Field(
        None, description="The answer. Without it, the format of the row determines the text."
    )
    system: str | None = Field(None, description="The system prompt.")
    id: str | None = None
    role: str | None = Field(None, description="The role of the agent, used to group figures.")
    domain: str | None = None
    session: str | None = None
    stage: str | None = None
    status: str | None = None
    finish_reason: str | None = None
    model: str | None = None
    reward: str | None = Field(None, description="A score of the reply: a number, or true and false.")
    split: str | None = Field(None, description="The split of the row, for data that is already split.")

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
        "also takes those without feedback.",
    )
    releases: tuple[str, ...] = Field(
        (), description="Only answers of these releases: their ids or id prefixes, or `base`."
    )
    since: Moment | None = Field(None, description="Only exchanges served at or after this date or time.")
    until: Moment | None = Field(None, description="Only exchanges served before this date or time.")
    sessions: tuple[str, ...] = Field((), description="Only these sessions.")
    skip_sessions: tuple[str, ...] = Field((), description="Exclude these sessions.")
    positive_confirms: bool = Field(
        False,
        description="Whether positive feedback makes a served reply a test reference. Off by default, "
        "because users praise what the model is good at, so the model would be graded by its own "
        "successes; a correction always counts.",
    )
    traces_confirm: bool = Field(
        False,
        description="Whether replies in traces that programs send to /v1/traces are test references, like "
        "logs. Off by default, because anyone with a key for traces would write the test.",
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
        None, description="An OpenAI-compatible endpoint, up to /v1: https://host/v1. Alternative: `engine`."
    )
    engine: str | None = Field(
        None,
        pattern=TEACHER_ENGINE,
        description="Use an engine on this machine instead: embedded, or llamacpp with an optional precision "
        "(llamacpp/q4_1).",
    )
    model: str = Field(
        min_length=1,
        description="The model to request from the endpoint; for an engine, a base: a folder, a name on the "
        "Hub, or smollm2-135m-instruct.",
    )
    api_key_env: VariableName | None = Field(
        None, description="Environment variable that contains the key; without it, no key is sent."
    )
    max_tokens: int = Field(1024, ge=16, description="Maximum answer length. Longer answers are rejected.")
    concurrency: int = Field(4, ge=1, le=64, description="Concurrent requests.")
    requests_per_minute: float | None = Field(
        None, gt=0, description="Maximum number of requests, retries included."
    )
    price_in: float | None = Field(None, ge=0, description="USD per million prompt tokens.")
    price_out: float | None = Field(None, ge=0, description="USD per million completion tokens.")
    max_cost: float | None = Field(
        None, gt=0, description="Budget in USD for all answers, earlier runs included; requires prices."
    )
    max_total_tokens: int | None = Field(
        None, gt=0, description="Budget in tokens for all answers, earlier runs included."
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
        get_args(RepairableFault), description="Faults of the rows to repair."
    )
    samples: int = Field(1, ge=1, le=9, description="Answers per prompt; see `agreement`.")
    agreement: float = Field(
        0.6,
        ge=0,
        le=1,
        description="With several samples: accept the answer that agrees best with the others if its mean "
        "similarity to them is at least this.",
    )
    judge_at_least: float | None = Field(
        None,
        ge=1,
        le=5,
        description="Lowest accepted score of the judge under evaluate.judge; unset: no judge.",
    )
    augment: tuple[str, ...] = Field((), description="Roles that get new rows from prompts of other roles.")
    augment_to: int = Field(10, ge=1, description="Target number of usable rows for such a role.")


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
        description="Format or mapping of some of the log files, by file, folder or glob; the first match "
        "applies. Other files use `format` and `mapping`.",
    )
    system_prompt: str | None = Field(
        None, description="System prompt for rows whose role has none under `system_prompts`."
    )
    system_prompts: dict[str, str] = Field({}, description="System prompt for each agent role.")
    logged_system_prompt: Literal["replace", "keep_after", "drop"] = Field(
        "replace",
        description="What to do with the logged system prompt: if another one is set, it replaces the logged "
        "one or is put before it; `drop` always removes it, so that its effect is trained in. "
        "Tool definitions are kept.",
    )
    reasoning: Literal["keep", "drop"] = Field(
        "keep", description="Whether to train on logged reasoning, in <think> tags before the answer."
    )
    keep_status: tuple[str, ...] = Field(
        ("success", "succeeded", "ok", "completed"),
        description="Drop rows whose log states another status. Rows without a status are kept.",
    )
    drop_failed: bool = Field(
        True, description="Drop rows with any other status, and replies that are error messages."
    )
    keep: Annotated[str, AfterValidator(require_condition)] | None = Field(
        None,
        description="Keep only rows whose fields meet this condition, such as `stars >= 3 or stars missing`: "
        f"{GRAMMAR}. Captured and repaired rows have their own settings.",
    )
    rated_bad_below: float | None = Field(
        None,
        description="Replies with a score below this are rated bad, for example 3 on a scale from 1 to 5. "
        "Scores of 0 or less always are.",
    )
    score_weights: dict[float, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {},
        description="How often to train on rows per epoch, by their score: {1: 0, 3: 0.5, 5: 2}. Values in "
        "between are interpolated; rows without a score count once. Rows in the lower half of "
        "this scale are not test references.",
    )
    score_pairs: float | None = Field(
        None,
        gt=0,
        description="Build a preference pair from the best and the worst reply to the same prompt if their "
        "scores differ by at least this; the worse reply is not used as a row.",
    )
    drop_rated_bad: bool = Field(
        True,
        description="Drop replies that the log labels bad (`label: false`) or scores 0 or less, or below "
        "`rated_bad_below`. `false` keeps them as bad replies for `train.objective: kto`; none "
        "is a test reference.",
    )
    drop_placeholders: bool = Field(True, description="Drop placeholder replies such as 'Mock response'.")
    drop_truncated: bool = Field(True, description="Drop replies that were cut off.")
    drop_broken_calls: bool = Field(
        True,
        description="Drop replies whose tool calls do not parse, use a tool that the prompt does not define, "
        "have arguments that violate its schema, or repeat a call whose result did not change. "
        "Earlier turns with such calls stay as context and are not trained on.",
    )
    drop_unmatched_calls: bool = Field(
        False,
        description="Drop rows whose prompt has tool results without a call, or calls without a result.",
    )
    redact: bool = Field(True, description="Replace secrets and personal data with placeholders.")
    near_duplicate: float = Field(
        0.85,
        gt=0,
        le=1,
        description="Rows whose question and reply are at least this similar count as duplicates.",
    )
    keep_duplicate: Literal["first", "last", "longest"] = Field(
        "first", description="Which of several equal or nearly equal rows to keep."
    )
    conflicts: Literal["keep_last", "drop_all", "keep_all"] = Field(
        "keep_last",
        description="Which replies to the same prompt to keep: the one logged last, none, or all.",
    )
    split_by: str = Field(
        "question",
        description="What must stay in one split: `question` (the same question), `session`, or a key of a "
        "row.",
    )
    stratify: Literal["role", "domain", "nothing"] = Field(
        "role", description="What to balance across splits, as far as groups allow."
    )
    question_similarity: float = Field(
        0.7, gt=0, le=1, description="Questions at least this similar are put in the same split."
    )
    paraphrases: Literal["off", "embedder"] = Field(
        "off",
        description="`embedder` also groups paraphrased questions; requires the extra `paraphrases`.",
    )
    validation: float = Field(0.1, ge=0, lt=1, description="Share of question groups used for validation.")
    test: float = Field(0.2, ge=0, lt=1, description="Share of question groups held out for evaluation.")
    train_on: Literal["last", "every", "marked"] = Field(
        "last",
        description="Replies of a conversation to train on: the last one, each in its own row, or each that "
        "the log marks with `weight: 1`. Replies with `weight: 0` are never trained on.",
    )
    max_tokens: int = Field(1024, ge=8, description="Maximum tokens per row; see `overlong`.")
    overlong: Literal["drop", "split_by_turn", "truncate"] = Field(
        "drop",
        description="Rows longer than max_tokens: drop them, split them into a row per turn, or leave out "
        "the oldest turns.",
    )
    pack_tokens: int | None = Field(
        None, ge=8, description="Length of packed sequences. Default: max_tokens."
    )
    seed: int = Field(0, description="Seed of the split assignment.")
    captures: CaptureSettings = Field(
        default_factory=CaptureSettings,
        description="Which captured exchanges to use as rows; `graft data captures` uses the same filter.",
    )
    repair: RepairSettings = Field(
        default_factory=RepairSettings,
        description="How `graft data repair` has a teacher answer rows that would be dropped.",
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

        Left out if nothing is set: datasets of logs without captures keep the names that they had. What is
        repaired is a log of its own: how it was made does not change the dataset.
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

    keep: Keep = Field(default_factory=Keep, description="Its own rows. Default: all rows.")
    replay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of its training rows drawn from the other rows, to prevent forgetting.",
    )
    curriculum: bool = Field(False, description="Train on the rows in order of their stages.")
    weights: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {}, description="How often to train on rows of a role per epoch. Default: 1."
    )
    rl: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of its training questions reserved for reinforcement learning.",
    )
    repaired: bool = Field(
        True, description="Train on rows answered by a teacher; `false` gives a model to compare with."
    )

    def to_manifest(self) -> dict[str, Any]:
        """The settings as a dataset's manifest states them; `repaired` only where it leaves rows out."""
        stated = publishable(self)
        if self.repaired:
            del stated["repaired"]
        return stated
