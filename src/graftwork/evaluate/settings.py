"""The `evaluate` settings of graft.yaml, validated when they are read."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from graftwork.evaluate.subjects import parse_subject
from graftwork.grading.answers import AnswerFields
from graftwork.grading.checks import GradeCheck, right_or_wrong
from graftwork.grading.metrics import (
    ALWAYS_MEASURED,
    CHECKS_PASSED,
    CONTEXT_GRADERS,
    GRADERS,
    JUDGE_PREFERENCE,
    JUDGE_SCORE,
    METRICS,
    OPTIONAL_MEASURED,
    PERPLEXITY,
    TASK_SUCCESS,
    find_extension,
)
from graftwork.process.sandbox.settings import SandboxSettings
from graftwork.records.base import Record
from graftwork.records.errors import UserError
from graftwork.records.report import Case
from graftwork.text.redact import EndpointUrl, VariableName

RUBRIC = (
    "Is the answer correct, complete, supported by what the user gave, and in the form that was "
    "asked for? Length by itself is no merit."
)
"""Part of what a calibration is for: other words need new labels of people."""


class JudgeSettings(Record):
    """A judge: another model that compares answers. The key is never written anywhere."""

    url: EndpointUrl = Field(description="URL of the endpoint, up to /v1: https://host/v1.")
    model: str = Field(min_length=1, description="Name of the model at the endpoint.")
    api_key_env: VariableName | None = Field(
        None,
        description="Environment variable that contains the key; without it, no key is sent.",
    )
    modes: tuple[Literal["pairwise", "pointwise"], ...] = Field(
        ("pairwise",),
        description="pairwise: which of two answers is better, asked in both orders; pointwise: a score from "
        "1 to 5.",
    )
    rubric: str = Field(RUBRIC, min_length=1, description="Instructions for the judge.")
    show_reference: bool = Field(True, description="Show the logged reply to the judge.")
    max_tokens: int = Field(512, ge=16, description="Maximum tokens per judge reply.")
    concurrency: int = Field(4, ge=1, le=64, description="Concurrent requests.")
    max_questions: int | None = Field(None, ge=1, description="Maximum number of requests.")
    max_cost: float | None = Field(
        None, gt=0, description="Send no more requests after this cost; requires prices."
    )
    min_kappa: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Minimum for the lower bound of Cohen's kappa with human labels. A judge below it does "
        "not count in the gate; see `graft eval calibrate`.",
    )
    min_labels: int = Field(30, ge=1, description="Minimum number of human labels for a calibration.")
    price_in: float | None = Field(None, ge=0, description="USD per million prompt tokens.")
    price_out: float | None = Field(None, ge=0, description="USD per million completion tokens.")

    @model_validator(mode="after")
    def _cost_has_prices(self) -> Self:
        if self.max_cost is not None and (self.price_in is None or self.price_out is None):
            raise ValueError("max_cost requires price_in and price_out: otherwise the cost is unknown")
        if not self.modes:
            raise ValueError("modes: specify pairwise, pointwise or both")
        return self


Slice = Literal["group", "role", "domain", "session", "length"]

BY_NAME = (*GRADERS, *CONTEXT_GRADERS, TASK_SUCCESS, CHECKS_PASSED)
"""What `evaluate.metrics` may name."""


def require_known(name: str, names: tuple[str, ...]) -> None:
    """Refuse an unknown metric, and suggest the nearest known one."""
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
        raise ValueError(f"there is no metric {name}; {hint}")


class SamplingSettings(Record):
    """How tokens are sampled. Temperature 0 is greedy decoding: the same answer every time."""

    temperature: float = Field(default=0.0, ge=0, le=5)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw only from the likeliest tokens that have so much of the chance together."""
    seed: int = Field(default=0, ge=0)
    """Where the drawing starts; it is in the report."""


class CostSettings(Record):
    """What answers cost, where neither the log nor the price tables know it."""

    usd_per_hour: float | None = Field(
        None, ge=0, description="Hourly price of the machine that evaluates, for the cost of your own models."
    )
    logged_model: str | None = Field(
        None, description="Model in the price table to use for calls whose model the log does not state."
    )
    requests_per_month: float | None = Field(
        None, gt=0, description="Requests per month. Default: extrapolated from the log."
    )
    success: str | None = Field(
        None, description="Metric that counts successes. Default: the primary metric of the gate."
    )
    gpu: str | None = Field(
        None, description="GPU to host the small model on. Default: the cheapest offer that can serve it."
    )


class PromptSettings(Record):
    """What the prompted base (`base+prompt`) is shown before each case."""

    examples: int = Field(
        4, ge=0, le=64, description="Maximum number of worked examples from the training split."
    )
    optimizer: Literal["none", "gepa"] = Field(
        "none", description="What improves the instruction; `gepa` requires the package of that name."
    )
    reflection: str | None = Field(
        None,
        description="Model that proposes instructions: an endpoint as URL#model,key=VARIABLE. Default: the "
        "base.",
    )
    max_answers: int = Field(
        200, ge=1, description="Maximum answers to training and validation rows during optimization."
    )

    @field_validator("reflection")
    @classmethod
    def _is_endpoint(cls, url: str | None) -> str | None:
        if url is None:
            return None
        try:
            subject = parse_subject(url)
        except UserError as mistake:
            raise ValueError(f"{mistake.what}: {mistake.why}") from mistake
        if subject.endpoint is None:
            raise ValueError("specify an endpoint as URL#model")
        return url


class EvaluateSettings(Record):
    """How subjects are evaluated. Decoding is greedy unless `sampling` is set."""

    cases: str | None = None
    """A JSONL file of cases instead of the test split, relative to graft.yaml."""
    max_cases: int | None = Field(default=None, ge=1)
    """At most this many held-out cases; all of them without it."""
    max_new_tokens: int = Field(default=64, ge=1)
    """An answer longer than this is cut off and counts as truncated."""
    batch_size: int | None = Field(default=None, ge=1)
    """Answers generated side by side. Without it 32 on a CPU, and on a GPU 256 or as many as fit."""
    metrics: tuple[str, ...] = tuple(METRICS)
    """What is graded: names of the metrics."""
    checks: tuple[GradeCheck, ...] = ()
    """Rules of your own: each a name, a metric, its parameters, and `where` for some of the cases."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """The confidence of every interval."""
    latency_cases: int = Field(default=8, ge=1)
    """Cases asked once more, one at a time, to measure the latency of a single request."""
    fields: AnswerFields = AnswerFields()
    """Which keys of a reply hold the answer, the citations and the refusal."""
    judge: JudgeSettings | None = None
    """Another model that judges the answers; none is asked without it."""
    sandbox: SandboxSettings = SandboxSettings()
    """The sandbox in which generated code is tested."""
    slices: tuple[Slice, ...] = ("group", "domain", "length")
    """What the report is cut by."""
    subjects: tuple[str, ...] = ()
    """Who is asked besides base and adapter: base+prompt, release:ID, an endpoint as URL#model, log."""
    repeats: int = Field(default=1, ge=1, le=100)
    """Answers to each case; they are averaged, and never count as more cases."""
    sampling: SamplingSettings = SamplingSettings()
    """How answers are drawn."""
    perplexity: bool = False
    """Measure how much the reply that the log holds surprises each model."""
    prompt: PromptSettings = PromptSettings()
    """How the base is prompted as the subject `base+prompt`."""
    costs: CostSettings = CostSettings()
    """Prices and volume, for what a task costs and what the small model saves."""

    @field_validator("metrics")
    @classmethod
    def _metrics_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise ValueError("specify at least one metric")
        for name in names:
            if name not in BY_NAME and find_extension(name) is None:
                require_known(name, BY_NAME)
        return tuple(dict.fromkeys(names))

    @field_validator("checks")
    @classmethod
    def _checks_have_names_of_their_own(cls, checks: tuple[GradeCheck, ...]) -> tuple[GradeCheck, ...]:
        reserved = {*BY_NAME, *ALWAYS_MEASURED, *OPTIONAL_MEASURED, JUDGE_SCORE, JUDGE_PREFERENCE}
        names: set[str] = set()
        for check in checks:
            if check.name in reserved or find_extension(check.name) is not None:
                raise ValueError(f"{check.name} is a metric already: give the check another name")
            if check.name in names:
                raise ValueError(f"two checks are called {check.name}: their figures would be mixed up")
            names.add(check.name)
        return checks

    @field_validator("subjects")
    @classmethod
    def _subjects_can_be_asked(cls, subjects: tuple[str, ...]) -> tuple[str, ...]:
        for subject in subjects:
            try:
                parse_subject(subject)
            except UserError as mistake:
                raise ValueError(f"{mistake.what}: {mistake.why}") from mistake
        return tuple(dict.fromkeys(subjects))

    @model_validator(mode="after")
    def _repeats_can_differ(self) -> Self:
        if self.repeats > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"repeats {self.repeats} with sampling at temperature 0 would give the same answer "
                "every time: give sampling.temperature, or one repeat"
            )
        return self

    @model_validator(mode="after")
    def _schema_is_there(self) -> Self:
        if "schema_valid" in self.metrics and self.fields.json_schema is None:
            raise ValueError("metrics: schema_valid needs a schema: set evaluate.fields.json_schema")
        return self

    @property
    def graded(self) -> tuple[str, ...]:
        """All metrics of an answer, in the order of the report."""
        pointwise = self.judge is not None and "pointwise" in self.judge.modes
        names = (*self.metrics, *(check.name for check in self.checks), *([JUDGE_SCORE] if pointwise else []))
        return tuple(dict.fromkeys(names))

    def graded_on(self, cases: Sequence[Case]) -> tuple[str, ...]:
        """`graded`, and task_success where cases have their own checks, which exist for that.

        It comes first where graft.yaml names no metrics: such cases are about little else.
        """
        if TASK_SUCCESS in self.graded or not any(case.checks for case in cases):
            return self.graded
        unnamed = self.metrics == tuple(METRICS)
        return (TASK_SUCCESS, *self.graded) if unnamed else (*self.graded, TASK_SUCCESS)


CORRECTNESS = (
    TASK_SUCCESS,
    "code_passes",
    "answer_match",
    "tool_calls",
    "citation_correct",
    "nearer_to_preferred",
    JUDGE_SCORE,
    "chrf",
    "token_f1",
    "edit_similarity",
)
"""Metrics by name that distinguish a correct answer from a wrong one, the most reliable first."""


def choose_primary(settings: EvaluateSettings) -> str:
    """The metric that an adapter must be better at than the base where graft.yaml names none.

    A check that holds answers against the reference comes first, one about all fields before one about a
    single field; then functions and tests of the project; then metrics by name. `task_success` represents
    the rule that is missing where nothing distinguishes right from wrong.
    """
    deciding = [check for check in settings.checks if check.decides_right]
    ranked = sorted(deciding, key=lambda check: (check.metric != "all_fields", not check.against_reference))
    metrics = [name for name in CORRECTNESS if name in settings.graded]
    return next(iter([check.name for check in ranked] + metrics), TASK_SUCCESS)


def choose_success(settings: EvaluateSettings) -> str:
    """The metric by which a case is a success: what `cost_per_success` counts."""
    return settings.costs.success or choose_primary(settings)


def known_metrics(settings: EvaluateSettings) -> tuple[str, ...]:
    """Metrics that an evaluation with these settings measures, so that a rule of the gate can name them."""
    measured = [name for name in OPTIONAL_MEASURED if name != PERPLEXITY or settings.perplexity]
    return (*settings.graded, *ALWAYS_MEASURED, *measured)


def require_evaluated(name: str, settings: EvaluateSettings) -> None:
    """A rule about a metric that is not measured could never be decided."""
    pairwise = settings.judge is not None and "pairwise" in settings.judge.modes
    comparable = (*known_metrics(settings), *([JUDGE_PREFERENCE] if pairwise else []))
    if name in comparable:
        # Held-out rows have no checks: only graft.yaml, or a file of cases, can say what is correct.
        by_checks = name in (TASK_SUCCESS, CHECKS_PASSED) and settings.cases is None
        if by_checks and not right_or_wrong(settings.checks):
            raise ValueError(
                f"nothing says when an answer is correct, so {name} would never be measured; write a rule "
                "under evaluate.checks, such as {name: done, contains: DONE}"
            )
        return
    if name in BY_NAME:
        raise ValueError(f"the metric {name} is not evaluated; add it to evaluate.metrics")
    if name == PERPLEXITY:
        raise ValueError(f"the metric {name} is not evaluated; set evaluate.perplexity: true")
    if name in (JUDGE_SCORE, JUDGE_PREFERENCE):
        raise ValueError(
            f"the metric {name} is not evaluated; specify the judge and its modes under evaluate.judge"
        )
    require_known(name, comparable)
