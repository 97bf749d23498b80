"""The page in a real browser: accessibility of every view, keys, live curves, no request that leaves."""

import json
import shutil
from pathlib import Path

import pytest
from served_page import serve
from web_views import list_views

from free_ports import free_port
from graftwork.api import endpoint
from graftwork.api.project import open_project

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 360, "height": 800}
PATIENCE = 300_000
"""Milliseconds: a browser on a busy machine starts and draws late."""
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            timeout=PATIENCE,
        )
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def axe() -> str:
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


class Tab:
    """A tab that has signed in, with what went wrong in it."""

    def __init__(self, browser, served, **options) -> None:
        self.context = browser.new_context(viewport=WIDE, **options)
        self.context.set_default_timeout(PATIENCE)
        name, _, value = served.cookie.partition("=")
        self.context.add_cookies([{"name": name, "value": value, "url": served.base}])
        self.page = self.context.new_page()
        self.base, self.trouble, self.outside = served.base, [], []
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("console", self._hear)
        self.page.on("request", self._watch)

    def _hear(self, message) -> None:
        if message.type in ("error", "warning") and "404" not in message.text:
            self.trouble.append(message.text)

    def _watch(self, request) -> None:
        if not request.url.startswith((self.base, "data:")):
            self.outside.append(request.url)

    def open(self, path: str):
        self.page.goto(self.base + path, wait_until="load")
        return self.page


@pytest.fixture
def tab(browser, page):
    opened = Tab(browser, page)
    yield opened
    opened.context.close()


def wait_until_live(page) -> None:
    page.locator("#live-state", has_text="live").wait_for(state="attached")


def find_violations(tab, name, scheme, rules=None) -> list[str]:
    run_only = {"type": "rule", "values": rules} if rules else {"type": "tag", "values": RULES}
    found = tab.page.evaluate("only => axe.run({runOnly: only, resultTypes: ['violations']})", run_only)
    return [
        f"{name} ({scheme}, {tab.page.viewport_size['width']} px): {violation['id']}: {node['html'][:200]}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


def check_views(tab, views, axe) -> list[str]:
    """Each view is loaded once; colors and widths are changed in place."""
    violations = []
    for name, path in views.items():
        tab.page.set_viewport_size(WIDE)
        tab.open(path)
        tab.page.evaluate(axe)
        for size in (WIDE, NARROW):
            tab.page.set_viewport_size(size)
            for scheme in ("light", "dark"):
                tab.page.emulate_media(color_scheme=scheme)
                violations += find_violations(tab, name, scheme)
        if tab.page.evaluate("document.documentElement.scrollWidth") > NARROW["width"]:
            violations.append(f"{name}: wider than a phone")
    return violations


# Lists, tables of numbers, charts, forms, marked texts, code: what the other views are made of.
KINDS_OF_VIEWS = (
    "captures selected",
    "overview checked",
    "rows",
    "run",
    "case",
    "release",
    "playground",
    "week tried",
    "component",
)


def test_views_are_silent_fit_a_phone_and_reach_nothing_outside_and_each_kind_is_accessible(
    tab, made_project, axe
):
    too_wide, violations = [], []
    tab.page.set_viewport_size(NARROW)
    for name, path in list_views(made_project).items():
        tab.open(path)
        if tab.page.evaluate("document.documentElement.scrollWidth") > NARROW["width"]:
            too_wide.append(name)
        if name in KINDS_OF_VIEWS:
            tab.page.evaluate(axe)
            violations += find_violations(tab, name, "light")
            tab.page.emulate_media(color_scheme="dark")
            violations += find_violations(tab, name, "dark", ["color-contrast"])
            tab.page.emulate_media(color_scheme="light")
    assert not too_wide
    assert not violations
    assert not tab.trouble
    assert not tab.outside


@pytest.mark.slow
def test_every_view_is_accessible_in_both_color_schemes_and_both_widths(
    tab, made_project, axe, browser, shop
):
    assert not check_views(tab, list_views(made_project), axe)
    with serve(shop, allow_actions=True) as served:
        acting = Tab(browser, served)
        assert not check_views(acting, list_views(made_project), axe)
        acting.context.close()


def test_the_queue_is_accessible_and_works_by_keys_alone(browser, acting, axe):
    tab = Tab(browser, acting)
    page = tab.open("/review")
    page.evaluate(axe)
    assert not find_violations(tab, "review", "light")
    first = page.locator("input[name=key]").get_attribute("value")
    page.keyboard.press("1")
    page.wait_for_url("**/review?notice=accepted")
    second = page.locator("input[name=key]").get_attribute("value")
    assert second != first
    page.keyboard.press("e")
    page.keyboard.type("Better: ")
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    page.wait_for_url("**/review?notice=answer*replaced")
    page.keyboard.press("u")
    page.wait_for_url("**/review?notice=taken*")
    assert page.locator("input[name=key]").get_attribute("value") == second
    assert not tab.trouble
    tab.context.close()


def test_cases_are_read_by_keys(tab):
    page = tab.open("/evaluation/cases?outcome=won")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    chosen = page.locator(".items .chosen a").get_attribute("href")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**{chosen}")
    page.keyboard.press("j")
    page.wait_for_url(lambda url: not url.endswith(chosen))
    page.keyboard.press("Escape")
    page.wait_for_url("**/evaluation/cases?*outcome=won*")


def test_captured_markup_does_nothing(tab, made_project):
    page = tab.open(list_views(made_project)["capture"])
    assert "hacked" not in page.title()
    assert page.locator("main img, main script").count() == 0
    assert "<img src=x onerror=alert(1)>" in page.locator("main").inner_text()


def test_a_page_follows_the_project_without_a_reload(browser, shop):
    from graftwork.api.project import open_project
    from graftwork.api.releases import rollback

    with serve(shop) as served:
        tab = Tab(browser, served)
        page = tab.open("/")
        wait_until_live(page)
        page.evaluate("window.same = true")
        rollback(open_project(shop), alias="champion", reason="seen by everybody", who="ada")
        page.wait_for_selector("text=seen by everybody")
        assert page.evaluate("window.same")
        assert not tab.trouble
        tab.context.close()


def test_a_stream_goes_on_after_the_server_was_restarted(browser, shop):
    from graftwork.api.project import open_project
    from graftwork.api.releases import rollback

    port = free_port()  # one that nobody is given while the server is away
    with serve(shop, port=port) as served:
        tab = Tab(browser, served)
        page = tab.open("/")
        wait_until_live(page)
    rollback(open_project(shop), alias="champion", reason="while it was away", who="ada")
    with serve(shop, port=port):
        page.wait_for_selector("text=while it was away")
        tab.context.close()


def test_a_curve_grows_while_the_run_works(browser, shop):
    import random

    from web_project import make_step

    from graftwork.api.project import open_project

    with open_project(shop).open() as work:
        run = work.runs.list(limit=1)[0]
        work.runs.update(run.id, state="running", when=run.updated_at)
    with serve(shop) as served:
        tab = Tab(browser, served)
        page = tab.open(f"/runs/{run.id}")
        page.wait_for_selector("#run-chart canvas")
        wait_until_live(page)
        # Listening first: an answer that comes before is not heard of.
        with (
            page.expect_response("**/curve.json?after=72") as grown,
            (Path(run.folder) / "steps.jsonl").open("a") as journal,
        ):
            journal.write(make_step(73, random.Random(1), 0.0).model_dump_json() + "\n")
        assert grown.value.json()["step"] == [73]
        assert page.locator("#chart-choices button").count() >= 4
        assert not tab.trouble
        tab.context.close()


def test_changes_in_quick_succession_bring_no_step_twice(tab, made_project):
    page = tab.open(list_views(made_project)["run"])
    page.wait_for_selector("#run-chart canvas")
    asked = []

    def answer(route):
        asked.append(route.request.url.partition("after=")[2])
        route.fulfill(json={"step": [73], "loss": [1.5]} if asked[-1] == "72" else {"step": [], "loss": []})

    page.route("**/curve.json?after=*", answer)
    change = "document.dispatchEvent(new Event('graft:change'))"
    with page.expect_response(lambda response: response.url.endswith("after=73") or len(asked) > 1):
        page.evaluate(f"{change}; {change}")
    assert asked == ["72", "73"]
    assert not tab.trouble


def test_the_loss_has_its_validation_and_its_skipped_steps(tab, made_project):
    steps = list(range(1, 41))
    curve = {
        "step": steps,
        "loss": [None if step == 20 else 2 / step for step in steps],
        "skipped": [float(step == 20) for step in steps],
        "gradient norm": [1.0] * 40,
        "validation": {"step": [10, 40], "loss": [0.4, 0.3]},
    }
    tab.page.route("**/curve.json?after=*", lambda route: route.fulfill(json=curve))
    page = tab.open(list_views(made_project)["run"])
    page.wait_for_selector("#run-chart canvas")
    legend = page.locator("#run-chart .u-legend .u-label")
    assert legend.all_inner_texts() == ["step", "loss", "trend", "validation", "skipped"]
    assert page.locator("#chart-choices button").all_inner_texts() == ["loss", "gradient norm"]
    page.locator("#chart-choices button", has_text="gradient norm").click()
    assert legend.all_inner_texts() == ["step", "gradient norm", "trend"]
    assert not tab.trouble


def follow(page, link) -> None:
    """Click and wait until the page behind the link is loaded as a whole."""
    with page.expect_navigation():
        link.click()


def test_everything_can_be_read_without_script(browser, page, made_project):
    tab = Tab(browser, page, java_script_enabled=False)
    views = list_views(made_project)
    assert tab.open(views["overview checked"]).locator(".step").count() == 9
    assert tab.open(views["run"]).locator("svg.plot").count() >= 2
    opened = tab.open(views["cases"])
    follow(opened, opened.locator(".items a").first)
    assert opened.locator(".answer pre").count() >= 2
    follow(opened, opened.locator("nav.side a", has_text="Releases"))
    assert opened.locator("table tbody tr").count() == 2
    assert not tab.trouble
    tab.context.close()


def test_the_link_signs_in_a_browser_and_leaves_no_token_in_the_address(browser, page):
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    opened = context.new_page()
    opened.goto(f"{page.base}/?token={page.sign_in.make_token()}")
    opened.wait_for_url(f"{page.base}/")
    assert opened.locator("h1").inner_text() == "corner-shop"
    context.close()


def test_a_form_is_sent_once_however_often_its_button_is_pressed(browser, acting):
    tab = Tab(browser, acting)
    page = tab.open("/cycle")
    sent = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.route("**/actions/cycle-approve", lambda route: route.fulfill(status=204))  # no page follows
    page.fill("#why-approve", "looked at the report")
    send = "document.getElementById('why-approve').form.requestSubmit()"
    with page.expect_request("**/actions/cycle-approve"):
        page.evaluate(f"{send}; {send}")
    page.wait_for_function("document.querySelector('form[aria-busy=true] button').disabled")
    assert len(sent) == 1
    assert not tab.trouble
    tab.context.close()


def test_the_playground_fills_in_a_case_shows_calls_and_takes_a_thumb(browser, acting, axe, monkeypatch):
    project = open_project(acting.folder)
    capture = endpoint.list_captures(project)[0].items[0].id
    asked = []

    def answer(_project, name, messages, **_options):
        asked.append(messages)
        text = 'Let me see.\n<tool_call>\n{"name": "lookup", "arguments": {"order": "A1"}}\n</tool_call>'
        headers = {endpoint.CAPTURE_HEADER: capture}
        return endpoint.EndpointAnswer(model=name, status=200, text=text, headers=headers)

    monkeypatch.setattr(endpoint, "_ask_in_background", answer)
    tab = Tab(browser, acting)
    page = tab.open("/playground")
    page.fill("#example", "2")
    page.get_by_role("button", name="Fill in").click()
    case = endpoint.read_chat_example(project, 2)
    page.wait_for_function("document.getElementById('prompt').value !== ''")
    assert page.input_value("#prompt").split() == case.messages[-1].content.split()
    page.select_option("#left", "base")
    page.select_option("#right", "")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_text('lookup(order="A1")').wait_for()
    assert "<tool_call>" not in page.locator(".answer").inner_text()
    assert [turn["role"] for turn in asked[0]] == [turn.role for turn in case.messages]
    page.evaluate(axe)
    assert not find_violations(tab, "playground answered", "light")
    page.fill("#note1", "just right")
    page.get_by_role("button", name="base: good answer").click()
    page.wait_for_url(f"**/captures/{capture}*")
    assert endpoint.read_capture(project, capture)[1][-1].comment == "just right"
    assert not tab.trouble
    tab.context.close()


def test_a_slider_plans_the_week_again_without_a_reload(tab):
    page = tab.open("/week/try?seconds=1")
    page.evaluate("window.same = true")
    slider = page.locator("input[name=spend]")
    slider.focus()
    slider.evaluate("input => { input.value = '0'; }")
    slider.dispatch_event("input")
    slider.dispatch_event("change")
    page.locator("#result h2", has_text="The week under these terms").wait_for()
    assert page.evaluate("window.same")
    assert "$0.00" in page.locator("#result").inner_text()
    assert page.locator("output[for=d-1]").inner_text() == "0 USD"
    assert not tab.trouble


def test_a_project_is_created_on_a_phone(browser, tmp_path, embedded_base, axe):
    rows = [{"prompt": f"Which plant is {n}?", "completion": f"Fern {n} by the pond."} for n in range(40)]
    (tmp_path / "plants.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serve(tmp_path, allow_actions=True) as served:
        tab = Tab(browser, served)
        tab.page.set_viewport_size(NARROW)
        page = tab.open("/")
        page.fill("#log", "plants.jsonl")
        page.get_by_role("button", name="Read the log").click()
        page.select_option("#base", "smollm2-135m-instruct")
        page.evaluate(axe)
        assert not find_violations(tab, "start", "light")
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        page.get_by_role("button", name="Create the project").click()
        page.get_by_role("heading", name="Nothing has run yet").wait_for()
        assert not tab.trouble
        assert not tab.outside
        tab.context.close()


def test_a_selection_of_captures_is_written_on_a_phone(browser, acting, axe):
    tab = Tab(browser, acting)
    tab.page.set_viewport_size(NARROW)
    page = tab.open("/captures?text=moss+number+12")
    page.evaluate(axe)
    assert not find_violations(tab, "captures selected", "light")
    page.get_by_role("button", name="Write").click()
    page.get_by_role("status").get_by_text("wrote 1 capture").wait_for()
    assert (acting.folder / "logs" / "captured.jsonl").is_file()
    page = tab.open("/captures?text=moss+number+12")
    page.locator(".items a").first.click()
    page.fill("#reply", "By the pond.")
    page.evaluate(axe)
    assert not find_violations(tab, "capture", "light")
    page.get_by_role("button", name="Save the correction").click()
    page.get_by_role("status").get_by_text("corrected").wait_for()
    assert not tab.trouble
    tab.context.close()
