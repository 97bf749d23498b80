"""The course of a run can be drawn whatever it was, and its page is whole."""

from hypothesis import given
from hypothesis import strategies as st
from page_reader import read
from report_sample import make_page
from test_report_page import EVIL, words
from test_report_plots import check, widths

from graftwork.pipeline.status import RunStatus
from graftwork.records.fleet import DeviceVitals, Vitals
from graftwork.records.plan import Drift, Residual
from graftwork.records.run import AnswerExtremes, GradedAnswer, TrainingEvaluation
from graftwork.views.charts import draw_course, draw_looks, draw_loss
from graftwork.views.page import render_report
from graftwork.views.status import list_devices
from graftwork.views.training import machine_courses, make_training_page

values = st.floats(allow_nan=True, allow_infinity=True, width=32) | st.floats(-1, 1)
spots = st.lists(
    st.builds(
        TrainingEvaluation,
        step=st.integers(1, 60),
        metric=st.just("json_valid"),
        value=st.floats(0, 5),
        cases=st.just(8),
        seconds=st.just(1.0),
        compared=st.booleans(),
    ),
    max_size=12,
)


@given(st.lists(st.tuples(st.floats(0, 1e5), values), max_size=40), st.lists(st.floats(0, 1e5), max_size=3))
def test_any_course_can_be_drawn(points, breaks):
    check(draw_course(points, title="Figure", unit="GiB", along="minute", breaks=breaks))


@given(spots, st.none() | st.integers(1, 60), widths)
def test_any_looks_can_be_drawn(looks, best_step, width):
    check(draw_looks(looks, name="JSON valid", last=60, best_step=best_step, width=width))
    check(draw_loss([(1, 2.0), (60, 1.0)], looks=looks, best_step=best_step, width=width))


def test_very_small_rates_are_reported_by_their_power():
    svg = str(draw_course([(1.0, 1e-5), (2.0, 5e-5)], title="Learning rate"))
    assert "× 10⁻⁵" in svg


def make_looked_at(metric="json_valid", **changes):
    looks = tuple(
        TrainingEvaluation(
            step=step, metric=metric, value=value, cases=cases, seconds=2.0, compared=cases == 8
        )
        for step, value, cases in ((16, 0.25, 8), (32, 0.75, 8), (48, 1.0, 5), (64, 0.5, 8))
    )
    page = make_page()
    outcome = page.outcome.model_copy(update={"looks": looks, "best_step": 32, **changes})
    vitals = tuple(
        Vitals(
            at=1000.0 + 10 * n,
            memory_gib=1.5 + n / 100,
            devices=(DeviceVitals(index=0, use_percent=90 + n % 5, power_watts=250),),
        )
        for n in range(24)
    )
    return page.model_copy(update={"outcome": outcome, "vitals": vitals})


def test_the_page_of_a_run_is_whole_and_asks_nothing_of_the_outside():
    page = make_looked_at()
    html = make_training_page(page.plan, page.outcome, page.steps, page.vitals)
    assert html == make_training_page(page.plan, page.outcome, page.steps, page.vitals)
    reader = read(html)
    assert reader.addresses == ["data:,"]
    assert len(reader.ids) == len(set(reader.ids))
    assert "script" not in reader.tags
    assert "http" not in html.replace("http-equiv", "")
    text = words(html)
    for output in (
        "Evaluations during training",
        "75 %",
        "fewer cases than the others: not compared",
        "best evaluation 0.75",
        "Learning rate",
        "Gradient norm",
        "Tokens a second",
        "Memory of the worker, GiB",
        "GPU use, %",
        "GPU power, W",
        "killed after step 27, resumed at 21",
        "Plan against reality",
    ):
        assert output in text, output
    assert "GPU temperature" not in text, "nobody measured it"


def test_each_of_two_gpus_has_its_own_course_and_its_own_line_in_the_status():
    devices = tuple(
        DeviceVitals(index=index, name="A40", use_percent=90.0 - 60 * index, temperature_c=70.0 + index)
        for index in range(2)
    )
    vitals = [Vitals(at=60.0 * minute, memory_gib=1.0, devices=devices) for minute in range(3)]
    titles = [course.name for course in machine_courses(vitals, ())]
    assert titles == [
        "Memory of the worker, GiB",
        *("GPU 0 use, %", "GPU 0 temperature, °C", "GPU 1 use, %", "GPU 1 temperature, °C"),
    ]
    run = RunStatus(id="r1", state="running", updated_at="", vitals=vitals[-1])
    assert [row[1:] for row in list_devices([run]).rows] == [
        ("0 A40", "90 %", "", "70 °C", ""),
        ("1 A40", "30 %", "", "71 °C", ""),
    ]
    assert list_devices([run.model_copy(update={"state": "done"})]) is None


def test_evaluations_by_loss_are_marked_on_the_loss_plot():
    page = make_looked_at("loss")
    html = render_report(page)
    assert "best evaluation 0.75 at step 32" in html
    assert "loss during training" not in html


def test_nothing_from_a_run_becomes_markup():
    page = make_looked_at(EVIL, run_id=EVIL)
    for html in (
        render_report(page),
        make_training_page(page.plan.model_copy(update={"base": EVIL}), page.outcome, page.steps, ()),
    ):
        assert "<script" not in html
        assert "img" not in read(html).tags


def make_answers(text):
    best = GradedAnswer(batch=4, prompt="p1", text=text, reward=1.0, parts={"task_success": 1.0}, audit=0.5)
    worst = best.model_copy(update={"reward": 0.25, "parts": {"task_success": 0.25, "short": None}})
    return AnswerExtremes(batches=4, best=(best,), worst=(worst,))


def test_the_page_shows_the_best_and_the_worst_answers_with_the_parts_of_their_rewards():
    page = make_looked_at()
    shown = words(
        make_training_page(page.plan, page.outcome, page.steps, (), answers=make_answers("return a + b"))
    )
    for output in ("Answers of the last batch", "return a + b", "task_success 0.25", "best", "worst"):
        assert output in shown, output
    html = make_training_page(page.plan, page.outcome, page.steps, (), answers=make_answers(EVIL))
    assert "<script" not in html
    assert "img" not in read(html).tags


def test_a_run_of_which_nothing_is_known_has_a_page_too():
    page = make_page()
    outcome = page.outcome.model_copy(update={"residuals": (), "restarts": 0})
    text = words(make_training_page(page.plan, outcome, (), ()))
    assert "nothing was recorded" in text
    assert "Evaluations during training" not in text


def test_a_run_outside_its_plan_gets_a_warning_with_the_cause_and_parts():
    page = make_page()
    minutes = page.plan.minutes
    drift = Drift(
        figure="minutes", planned=minutes, actual=9.0, says="time came to 9 min: mostly <validation>"
    )
    parts = (Residual(name="minutes.waiting for data", planned=minutes, actual=2.5),)
    outcome = page.outcome.model_copy(update={"drifts": (drift,), "residual_parts": parts})
    html = make_training_page(page.plan, outcome, page.steps, page.vitals)
    assert "mostly &lt;validation&gt;" in html
    assert "time: waiting for data" in html
    assert "mostly" not in make_training_page(page.plan, page.outcome, page.steps, page.vitals)


def test_skipped_steps_are_counted():
    page = make_page()
    outcome = page.outcome.model_copy(update={"skipped_steps": 3, "repeated_steps": 2})
    shown = words(make_training_page(page.plan, outcome, page.steps, ()))
    assert (
        "3 steps skipped: loss or gradient was not a number. The rows of 2 were trained on again later."
        in shown
    )
    assert "skipped" not in words(make_training_page(page.plan, page.outcome, page.steps, ()))
