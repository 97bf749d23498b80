"""An evaluation: its cases and jobs, the answers, what was measured, and the verdict of the gate on it."""

from typing import Any, Literal

from graftwork.records import errors
from graftwork.records.base import Record
from graftwork.records.interaction import CallUsage, Message, Origin


class Case(Record):
    """A held-out question with its logged reply."""

    id: str
    origin: Origin
    messages: tuple[Message, ...]
    reference: str
    group: str | None = None
    session: str | None = None
    domain: str | None = None
    """The subject that the case is about, if the log names it."""
    duration_ms: float | None = None
    """Duration of the logged reply, which is the latency of the log as a subject."""
    checks: tuple[dict[str, Any], ...] = ()
    """Checks of this case only, as `evaluate.checks` writes them."""
    reward: float | None = None
    """The reviewers' score for the logged reply, on the log's own scale."""
    rejected: str | None = None
    """The rejected reply, if the log has a preference pair."""
    usage: CallUsage | None = None
    """Tokens and cost of the logged reply, if the log states them."""
    logged_system: str | None = None
    """The logged system prompt of the case, if the dataset has another or none."""


class Endpoint(Record):
    """An OpenAI-compatible endpoint. The key itself is never stored, only its location."""

    url: str
    model: str
    api_key_env: str | None = None
    """The environment variable that holds the key; none is sent without one."""
    concurrency: int = 4
    attempts: int = 5
    timeout_seconds: float = 120.0


class EvalJob(Record):
    """All input of an evaluation worker. `adapter_folder` None means the base itself."""

    subject: str
    folder: str
    base_folder: str
    adapter_folder: str | None
    cases_file: str
    worked_example: tuple[Message, ...] = ()
    max_new_tokens: int
    batch_size: int
    threads: int | None = None
    latency_cases: int = 8
    reasoning: bool = True
    """Whether the template may enable reasoning, as the rows were rendered."""
    identity: str = ""
    """The hash of the subject's weights, or of its address; computed from the files if empty."""
    answers_folder: str | None = None
    """Where answers are stored for other evaluations of the same subject; None stores them nowhere else."""
    endpoint: Endpoint | None = None
    """An endpoint to use instead of a local model."""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    repeats: int = 1
    """Answers to each case. Greedy answers are all the same: then only one is generated."""
    perplexity: bool = False
    """Whether the loss of the logged reply is measured too."""
    device: str = "cpu"
    """`cpu`, `cuda`, or one GPU as `cuda:1`."""
    shards: int = 1
    """Processes that share the cases."""
    batches: tuple[tuple[int, tuple[str, ...]], ...] | None = None
    """The share of one process: which repeat of which cases; None for everything that is missing."""
    engine: str = ""
    """The engine: `graftwork`, or `llamacpp` with its version; empty lets the worker choose."""
    instruction: str | None = None
    """The system prompt of every case in place of its own."""
    logged_system: bool = False
    """Use the logged system prompt."""
    precision: str = ""
    """Type of the weights and of the arithmetic, such as `float32`; empty lets the worker choose."""


class TimingJob(Record):
    """Subjects on one base whose single requests are timed in turn, so that other load affects all
    equally."""

    folder: str
    jobs: tuple[EvalJob, ...]
    requests: int
    """Cases to time; each is put to every subject before the next one."""
    group: str
    """Identifies who was timed together, and on which cases."""
    answers_first: bool = False
    """Whether the same process answers the cases of each subject before it times them."""


class Answer(Record):
    """A subject's answer to a case."""

    case_id: str
    text: str
    tokens: int
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]
    seconds: float
    repeat: int = 0
    """Which of several answers to the same case this is, counted from 0."""
    first_token_seconds: float | None = None
    """Time to the first token, if the answer was streamed."""
    reference_loss: float | None = None
    """Mean negative log-likelihood of a token of the logged reply, if measured."""


class Generation(Record):
    """How the answers of a subject were produced."""

    subject: str
    answers: int
    seconds: float
    tokens_per_second: float
    single_latency_seconds: tuple[float, ...]
    peak_memory_gib: float
    settings: dict[str, Any]
    first_token_seconds: tuple[float, ...] = ()
    """Until the first token of each request that was timed alone."""
    timed_cases: tuple[str, ...] = ()
    """The case of each timed request, if recorded."""
    timed_group: str = ""
    """Subjects with the same group were timed in turn, request by request: their times can be compared in
    pairs. Empty if a subject was timed by itself."""
    times: dict[str, float] = {}
    """Seconds besides answering: loading the model, recording passes on a GPU."""


class Metric(Record):
    """A measured figure. A rate has `successes` of `n`; a score is a mean of grades from 0 to 1; a
    number has only its value and range.

    `low` and `high` are the bounds of the interval at `confidence`; `scores` holds one value a case (None if
    the metric does not apply), so that subjects can be compared in pairs.
    """

    name: str
    kind: Literal["rate", "score", "number"]
    value: float
    low: float
    high: float
    n: int
    successes: int | None = None
    unit: str = ""
    confidence: float = 0.95
    scores: dict[str, float | None] = {}
    clusters: int = 0
    """Number of sessions of the cases, if that made the interval wider; 0 if each is independent."""
    method: str = ""
    """Method of the interval, as the report names it."""
    failed: int = 0
    """Cases on which the grader itself failed: they are not in `n`, and nothing is known about them."""
    why_failed: str = ""
    """The grader's error at the first of them."""
    failed_cases: tuple[str, ...] = ()
    """The cases in question."""
    vacuous: str = ""
    """Why the figure proves nothing: no case is of the kind that the metric is about. Empty if there is
    one.
    """


class Comparison(Record):
    """Two subjects on the same cases, pair by pair."""

    metric: str
    baseline: str
    candidate: str
    n: int
    wins: int
    losses: int
    difference: float
    low: float
    high: float
    p_value: float
    test: str = ""
    """The test behind p, as the report names it."""
    clusters: int = 0
    """Sessions that were compared as units; 0 if every pair is independent."""
    margin: float | None = None
    """How much worse the candidate may be, set beforehand, in the unit of `difference`."""
    non_inferior: bool | None = None
    """Whether the candidate is proven to be worse by less than `margin`; None without a margin."""
    adjusted_p: float | None = None
    """p after Holm's correction, if several candidates were compared with one baseline."""


class JudgeTally(Record):
    """Two subjects before a judge, every pair in both orders. Inconsistent pairs are neither won nor lost."""

    model: str
    baseline: str
    candidate: str
    pairs: int
    wins: int
    losses: int
    ties: int
    inconsistent: int
    unjudged: dict[str, str] = {}
    """Cases without a verdict, and why."""
    agreement: float
    """The share of pairs with the same verdict of the judge in both orders."""
    agreement_low: float
    agreement_high: float
    first_place_share: float
    """How often the answer in the first position was preferred; 0.5 is fair."""
    position_bias_p: float
    """The probability of so lopsided an inconsistency if the position did not matter."""
    confidence: float = 0.95
    grades: dict[str, float | None] = {}
    """A case: 1 the candidate is better, 0 the baseline, 0.5 neither."""
    questions: int = 0
    cost: float | None = None


class SubjectReport(Record):
    subject: str
    metrics: dict[str, Metric]
    generation: Generation


class Power(Record):
    """What this many cases can show. `detectable` is None if no gain, however large, would show."""

    cases: int
    detectable: float | None
    """The smallest gain, as a share, that shows in four evaluations of five."""
    asked: float
    """A gain that one would like to see, as a share."""
    needed: int
    """How many cases show that gain in four evaluations of five."""
    loss_rate: float
    """The assumed share of cases that get worse anyway."""
    sentence: str


class SliceFigure(Record):
    """One metric on a part of the cases: those of one role, one domain, or of about one length."""

    by: str
    part: str
    metric: str
    n: int
    before: float
    before_low: float
    before_high: float
    after: float
    after_low: float
    after_high: float
    wins: int
    losses: int
    p_value: float | None = None
    """None if cases share sessions, so that pairs in a part are too few to be tested."""
    adjusted_p: float | None = None
    """p after Holm's correction over all parts that the metric was cut into this way."""


class ClassFigure(Record):
    """One label: how often it was expected, given, and both."""

    label: str
    cases: int
    answered: int
    right: int
    recall_low: float
    recall_high: float

    @property
    def recall(self) -> float:
        return self.right / self.cases if self.cases else 0.0

    @property
    def precision(self) -> float | None:
        """None if the label was never given."""
        return self.right / self.answered if self.answered else None


class Confusion(Record):
    """Confusions of labels by a subject. `counts` has a row for each class, a cell for each column."""

    metric: str
    field: str = ""
    subject: str
    columns: tuple[str, ...]
    """The labels in the order of the classes, then what was none of them."""
    counts: tuple[tuple[int, ...], ...]
    classes: tuple[ClassFigure, ...]

    def mistakes(self) -> list[tuple[int, str, str]]:
        """How often, which label, taken for what; most common first."""
        cells = [
            (count, figure.label, column)
            for figure, row in zip(self.classes, self.counts, strict=True)
            for column, count in zip(self.columns, row, strict=True)
            if count and column != figure.label
        ]
        return sorted(cells, key=lambda mistake: (-mistake[0], mistake[1], mistake[2]))


class Wear(Record):
    """Remaining validity of a test set that candidates were chosen on."""

    looks: int
    candidates: int
    """Different candidates that were measured on these cases; the same one again chooses nothing."""
    look: int = 0
    """Number of this look at these questions, in whichever set."""
    confidence: float
    """The required confidence of bounds at this look, so that all looks together keep their error rate."""
    chance_gain: float | None
    """A smaller gain may be chance, as a share; None if no gain on so few cases is significant."""
    fresh_gain: float | None
    """The same for cases that were not used before."""
    metric: str = ""
    """The metric whose losses were used to compute the two gains."""
    worn: bool
    sentence: str


class Report(Record):
    """Base and candidate on the same cases."""

    cases_hash: str
    cases: int
    baseline: SubjectReport
    candidate: SubjectReport
    comparisons: tuple[Comparison, ...]
    looks: int = 1
    settings: dict[str, Any] = {}
    groups: dict[str, str] = {}
    others: tuple[SubjectReport, ...] = ()
    """Further subjects on the same cases: the champion, other adapters, an endpoint, the log itself."""
    champion: str | None = None
    """Which of `others` is served now; the candidate is compared with it as well as with the baseline."""
    sessions: dict[str, str] = {}
    """The session of each case that has one: cases of one session do not count as independent."""
    judged: tuple[JudgeTally, ...] = ()
    """A judge's verdicts on pairs of subjects, where graft.yaml names one."""
    power: Power | None = None
    slices: tuple[SliceFigure, ...] = ()
    """The same figures on parts of the cases, cut as `evaluate.slices` says."""
    cuts: dict[str, dict[str, str]] = {}
    """By cut and by case, the part that each belongs to."""
    confusions: tuple[Confusion, ...] = ()
    """Confusions of labels, for each check that compares labels and each subject."""
    wear: Wear | None = None
    """How far these cases can still be trusted."""
    remarks: tuple[str, ...] = ()
    """Remarks on the subjects before comparing them, such as which of its rows the log contains."""
    source: str = ""
    """The tool that measured, if the report was imported; empty for our own."""


Decision = Literal["deploy", "iterate", "abort", "not_enough_evidence"]
RuleOutcome = Literal["pass", "fail", "unknown"]
RuleKind = Literal["limit", "invariant", "guardrail", "primary", "win", "loss"]

EXIT_CODES: dict[Decision, int] = {
    "deploy": errors.EXIT_DONE,
    "iterate": errors.EXIT_ITERATE,
    "abort": errors.EXIT_ABORT,
    "not_enough_evidence": errors.EXIT_NOT_ENOUGH_EVIDENCE,
}


class RuleResult(Record):
    """One rule, its figure, and a sentence."""

    metric: str
    rule: str
    outcome: RuleOutcome
    value: float | None
    low: float | None
    high: float | None
    limit: float
    sentence: str
    cases_to_decide: int | None = None
    """Fresh cases, pairs or timed requests like these that settle the rule in four evaluations of five."""
    sessions_to_decide: int | None = None
    """The sessions of those; None if every case is independent."""
    cases_with_these: int | None = None
    """The same including the cases of this evaluation: a further look at them costs more."""
    kind: RuleKind = "limit"
    against: str = ""
    """The subject that the candidate was compared with; empty if the figure is not a comparison."""
    margin: float | None = None
    """The allowed loss of a guardrail, in the metric's own unit."""
    n: int | None = None
    """Cases, pairs or measurements that the figure rests on."""
    p_value: float | None = None
    adjusted_p: float | None = None
    """p after Holm's correction, if several adapters were judged at once."""
    test: str = ""
    """Method of p or the interval, as the report names it."""
    vacuous: str = ""
    """Why the rule cannot be decided: no case is of the kind that it is about. It then never passes."""
    must: bool = True
    """False if another rule replaces this one: a cost win for the primary metric, or the reverse."""


class Verdict(Record):
    decision: Decision
    reason: str
    rules: tuple[RuleResult, ...]
    advice: tuple[str, ...] = ()
    report_hash: str
    rules_hash: str = ""
    """Hash of the gate's rules, so that a change of them shows."""
    cases_needed: int | None = None
    """Fresh cases that would settle every open rule, at the rates seen so far."""
    notes: tuple[str, ...] = ()
    """Notes besides the rules: that they were changed, that the test set is worn."""
    statistics: int = 1
    """Version of the statistics: 2 since tests are of means over sessions and looks at a test set cost."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.decision]


class NextStart(Record):
    """Between two training sessions of one model: the checkpoint from which the next one starts."""

    start: Literal["this", "before"]
    certain: bool
    """Whether the cases prove it; if not, `reason` says what it rests on."""
    reason: str
    rules: tuple[RuleResult, ...] = ()
    cases_needed: int | None = None
    adapter_hash: str = ""
    """The adapter to start from; empty if unknown."""
    adapter_folder: str = ""
