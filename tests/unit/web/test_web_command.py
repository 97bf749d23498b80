"""`graft ui`: what it needs, where it listens, and the page that runs already."""

import asyncio
import socket
import sys
import threading

import pytest
from served_page import START_SECONDS, serve

from graftwork.cli.ui import ui
from graftwork.records.errors import EnvironmentFailure, UserError


def test_without_the_extra_the_command_says_how_to_get_it(empty_project, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("graftwork.web", "starlette", "uvicorn"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(EnvironmentFailure) as refused:
        ui(project=empty_project, no_open=True)
    assert "[ui]" in refused.value.fix


def test_a_link_without_a_running_page_is_refused(empty_project):
    with pytest.raises(UserError, match="no page of this project is running"):
        ui(project=empty_project, link=True)


def test_a_second_start_finds_the_page_that_runs_and_gets_a_link_of_its_own(shop, capsys):
    from graftwork.web.security import sign_in_folder
    from graftwork.web.serve import SERVER_FILE, find_running, write_server_file

    with serve(shop) as served:
        write_server_file(sign_in_folder(shop) / SERVER_FILE, served.base, served.sign_in.boot)
        found = find_running(shop)
        assert found is not None
        assert served.sign_in.use_token(found.link.partition("token=")[2])
        ui(project=shop, link=True, json=True)
        assert '"already_running": true' in capsys.readouterr().out
    assert find_running(shop) is None


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("http://127.0.0.1:8910", True),
        ("http://localhost:8910", True),
        ("http://0.0.0.0:8910", True),
        ("http://192.0.2.7:8910", False),
        ("http://page.example:8910", False),
        ("https://127.0.0.1:8910", False),
        ("http://127.0.0.1:8910@page.example", False),
        ("http://page.example@127.0.0.1:8910", False),
        ("http://127.0.0.1:8910/x?y", False),
        ("http://127.0.0.1.page.example:8910", False),
        ("http://127.1:8910", False),
        ("http://[", False),
        ("", False),
    ],
)
def test_a_link_leads_to_this_machine_only(url, accepted):
    from graftwork.web.serve import is_on_this_machine

    assert is_on_this_machine(url) == accepted


def test_a_key_and_an_address_that_came_with_the_project_are_not_used(shop):
    from graftwork.web.security import KEY_FILE, SignIn, load_key, sign_in_folder
    from graftwork.web.serve import SERVER_FILE, find_running, write_server_file

    planted = shop / ".graft" / "web"
    planted.mkdir(parents=True, exist_ok=True)
    (planted / KEY_FILE).write_text("00" * 32)
    with serve(shop) as served:
        write_server_file(planted / SERVER_FILE, served.base, served.sign_in.boot)
        assert find_running(shop) is None
        assert not served.sign_in.accepts_cookie(SignIn(bytes(32), "x").make_cookie())
    assert load_key(sign_in_folder(shop)) != bytes(32)
    assert shop not in sign_in_folder(shop).parents


def test_a_port_that_is_taken_is_named_and_the_next_one_is_used_by_default():
    from graftwork.web.serve import open_socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="cannot be used"):
            open_socket("127.0.0.1", taken.getsockname()[1])
    with open_socket("127.0.0.1", None) as first, open_socket("127.0.0.1", None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


def test_the_warm_up_makes_the_first_screen_as_a_signed_in_visitor_gets_it(shop):
    from graftwork.web.app import make_app
    from graftwork.web.security import SignIn
    from graftwork.web.serve import warm_up

    sign_in, host, answers = SignIn(b"k" * 32, "boot"), "127.0.0.1:8910", []
    app = make_app(shop, sign_in, hosts=frozenset({host}))

    async def watched(scope, receive, send):
        async def note(message):
            answers.append(message)
            await send(message)

        await app(scope, receive, note)

    cookie = f"{sign_in.cookie_name}={sign_in.make_cookie()}"
    warm_up(watched, host=host, cookie=cookie, seconds=START_SECONDS)
    assert answers[0]["status"] == 200
    assert b"corner" in answers[1]["body"]


def test_a_warm_up_that_fails_or_hangs_does_not_keep_the_server_from_starting():
    from graftwork.web.serve import warm_up

    release = threading.Event()

    async def fails(scope, receive, send):
        raise ZeroDivisionError

    async def hangs(scope, receive, send):
        await asyncio.to_thread(release.wait, 30)

    warm_up(fails, host="x", cookie="")
    warm_up(hangs, host="x", cookie="", seconds=0.01)
    assert not release.is_set()
    release.set()
