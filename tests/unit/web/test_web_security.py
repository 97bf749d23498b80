"""Who may see the page: tokens, cookies, hosts, origins, and the headers of every answer."""

import json
import re
import urllib.error
import urllib.request

import pytest
from served_page import serve

from graftwork.web.security import POLICY, SESSION_SECONDS, TOKEN_SECONDS, SignIn, load_key


def test_a_token_signs_in_once():
    sign_in = SignIn(b"k" * 32, "boot")
    token = sign_in.make_token()
    assert sign_in.use_token(token)
    assert not sign_in.use_token(token)


def test_a_token_of_another_start_or_after_its_time_is_refused():
    sign_in = SignIn(b"k" * 32, "boot")
    assert not SignIn(b"k" * 32, "another").use_token(sign_in.make_token())
    assert not SignIn(b"x" * 32, "boot").use_token(sign_in.make_token())
    assert not sign_in.use_token(sign_in.make_token(now=0), now=TOKEN_SECONDS + 1)


@pytest.mark.parametrize("token", ["", ".", "..", "a.b.c", "a.9999999999." + "0" * 40, "ü.1.é"])
def test_an_invented_token_or_cookie_is_refused(token):
    sign_in = SignIn(b"k" * 32, "boot")
    assert not sign_in.use_token(token)
    assert not sign_in.accepts_cookie(token)


def test_a_cookie_survives_a_restart_and_ends_after_its_time():
    cookie = SignIn(b"k" * 32, "boot").make_cookie(now=0)
    assert SignIn(b"k" * 32, "later").accepts_cookie(cookie, now=SESSION_SECONDS - 1)
    assert not SignIn(b"k" * 32, "later").accepts_cookie(cookie, now=SESSION_SECONDS + 1)


def test_the_key_is_made_once_and_readable_by_its_owner_alone(tmp_path):
    key = load_key(tmp_path / "web")
    assert load_key(tmp_path / "web") == key
    assert (tmp_path / "web" / "key").stat().st_mode & 0o077 == 0


def fetch(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=300) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_without_a_cookie_nothing_of_the_project_is_shown(page):
    for path in ("/", "/runs", "/captures", "/events", "/runs/compare", "/report"):
        status, text, _ = fetch(page.base + path)
        assert status == 401
        assert "corner-shop" not in text
        assert "graft ui --link" in text


def test_the_link_sets_a_strict_cookie_and_opens_the_page(page):
    status, text, headers = fetch(f"{page.base}/?token={page.sign_in.make_token()}")
    assert status == 200
    cookie = headers["set-cookie"]
    assert "httponly" in cookie.lower()
    assert "samesite=strict" in cookie.lower()
    assert 'content="0;url=/"' in text
    status, text, _ = fetch(page.base, cookie=cookie.split(";")[0])
    assert status == 200
    assert "corner-shop" in text


def test_a_link_from_another_site_is_followed_by_a_person_only(page):
    status, text, _ = fetch(page.base + "/runs?state=failed&text=%22%3E", **{"sec-fetch-site": "cross-site"})
    assert status == 200
    assert "refresh" not in text
    assert 'href="/runs?state=failed&amp;text=%22%3E"' in text
    assert "corner-shop" not in text


@pytest.mark.parametrize(
    "path",
    ["//evil.example/x", "///evil.example", "/%5Cevil.example", "/%09/evil.example", "/%2F/evil.example"],
)
def test_no_page_leads_to_another_site(page, path):
    address = re.compile(r'(?:href|value|url)="?=?(/[/\\\s][^"]*)')
    status, text, _ = fetch(page.base + path, **{"sec-fetch-site": "cross-site"})
    assert status == 200
    assert "//evil" not in text
    assert not address.search(text)
    signed_in = page.visitor.get(path)
    assert signed_in.status == 404
    assert not address.search(signed_in.text)


def test_another_host_name_for_this_machine_is_refused(page):
    status, _, _ = fetch(page.base, host="evil.example:80", cookie=page.cookie)
    assert status == 421


def test_a_post_from_another_page_is_refused(page):
    for origin in ("http://evil.example", "null", page.base.replace("http:", "x:") + ".evil"):
        assert page.visitor.post("/actions/run", origin=origin, reason="x").status == 403


def test_every_answer_has_the_strict_policy(page):
    for path in ("/", "/nothing", "/static/app.js", "/runs/none"):
        answer = page.visitor.get(path)
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY


def test_the_reports_of_all_models_are_listed_and_shown(tmp_path):
    (tmp_path / "graft.yaml").write_text(
        "project: pair\nbase: small\ndata: {logs: [a.jsonl]}\nmodels: {writer: {}, clerk: {}}\n"
    )
    (tmp_path / "report.html").write_text("of the writer")
    with serve(tmp_path) as served:
        assert served.visitor.get("/report").text == "of the writer"
        (tmp_path / "report-clerk.html").write_text("of the clerk")
        assert 'href="/report/clerk"' in served.visitor.get("/report").text
        assert served.visitor.get("/report/writer").text == "of the writer"
        assert served.visitor.get("/report/clerk").text == "of the clerk"
        assert served.visitor.get("/report/nobody").status == 404


def test_the_report_is_shut_in(page, made_project):
    (made_project / "report.html").write_text("<script>1</script>")
    try:
        answer = page.visitor.get("/report")
    finally:
        (made_project / "report.html").unlink()
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert "sandbox" in policy
    assert "allow-same-origin" not in policy


def test_no_page_has_inline_script_style_or_an_outside_address(page):
    for path in ("/", "/runs", "/evaluation", "/plan/fit"):
        text = page.visitor.get(path).text
        assert not re.search(r"<script(?! src=\"/static/)", text)
        assert not re.search(r"\sstyle=|<style|\son[a-z]+=\"", text)
        assert not re.search(r'(?:href|src|action)="(?:https?:)?//', text)


def test_vendored_files_are_those_of_the_manifest_with_their_licences():
    import hashlib
    from importlib.resources import files

    vendor = files("graftwork.web").joinpath("static/vendor")
    listed = json.loads(vendor.joinpath("vendored.json").read_text())
    found = {item.name for item in vendor.iterdir()} - {"vendored.json"}
    assert found == set(listed["sha256"])
    for name, digest in listed["sha256"].items():
        assert hashlib.sha256(vendor.joinpath(name).read_bytes()).hexdigest() == digest
    for package in listed["packages"]:
        assert any(name.endswith("LICENSE") for name in package["files"].values())


def test_a_cookie_of_one_project_does_not_open_another(made_project, empty_project, page):
    with serve(empty_project) as other:
        status, _, _ = fetch(other.base, cookie=page.cookie)
    assert status == 401
