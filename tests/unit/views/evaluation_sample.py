"""An invented evaluation: cases, what three subjects said, and the report of it."""

from graftwork.evaluate.comparison import wear_of, what_cases_show
from graftwork.evaluate.report import make_report, score, slice_report
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Answer, Case, Generation
from graftwork.views.evaluation_page import EvaluationPage

SETTINGS = EvaluateSettings.model_validate(
    {
        "metrics": ["token_f1"],
        "checks": [{"name": "says_six", "contains": "six"}, {"name": "polite", "contains": "please"}],
    }
)
HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script> <!-- \u2028 \ud800 six"


def make_cases(count=12):
    return tuple(
        Case(
            id=f"case-{i}",
            origin=Origin(file="logs/a.jsonl", line=i + 1),
            messages=(
                Message(role="system", content="You answer."),
                Message(role="user", content=f"When does shop {i} close?" + " Tell me." * (i % 5)),
            ),
            reference="It closes at six, please come.",
            group=("planner", "writer")[i % 2],
            domain=("hours", "prices", "ways")[i % 3],
        )
        for i in range(count)
    )


def make_answers(cases, texts):
    return [
        Answer(
            case_id=case.id,
            text=texts(i),
            tokens=5,
            prompt_tokens=9,
            finish_reason="stop",
            seconds=0.1,
        )
        for i, case in enumerate(cases)
    ]


def make_generation(subject, n):
    return Generation(
        subject=subject,
        answers=n,
        seconds=2.0,
        tokens_per_second=50.0,
        single_latency_seconds=(0.1, 0.2, 0.3),
        peak_memory_gib=1.0,
        settings={"temperature": 0.0, "seed": 7},
    )


def base_says(i):
    return "It closes at six." if i % 4 == 0 else "I do not know."


def adapter_says(i):
    return "It closes at seven, please." if i == 4 else "It closes at six, please come."


def make_evaluation(count=12, *, adapter=adapter_says, looks=1, candidates=1):
    cases = make_cases(count)
    answers = {
        "base": make_answers(cases, base_says),
        "adapter": make_answers(cases, adapter),
        "log": make_answers(cases, lambda i: cases[i].reference),
    }
    scored = {
        name: score(cases, answers=output, generation=make_generation(name, count), settings=SETTINGS)
        for name, output in answers.items()
    }
    report = make_report(
        cases,
        baseline=scored["base"],
        candidate=scored["adapter"],
        settings=SETTINGS,
        looks=looks,
        others=[scored["log"]],
    )
    report = slice_report(report, cases, by=("role", "domain", "length"))
    report = report.model_copy(
        update={
            "wear": wear_of(report, candidates=candidates, look=candidates),
            "power": what_cases_show(count),
        }
    )
    return EvaluationPage(
        project="corner-shop",
        report=report,
        cases=cases,
        answers={name: tuple(output) for name, output in answers.items()},
    )
