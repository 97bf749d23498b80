"""A test that is skipped for a reason that nobody has allowed fails the run."""

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def run(pytester, request):
    """Runs one test that skips itself, with a list of allowed reasons."""

    def run(reason: str, allowed: str, *options: str) -> pytest.RunResult:
        folder = request.config.rootpath / "tests"
        pytester.makeconftest(
            f"""
            import sys
            from pathlib import Path
            sys.path.insert(0, {str(folder)!r})
            from skips import AllowedSkips

            def pytest_configure(config):
                config.pluginmanager.register(AllowedSkips(Path("allowed.txt"), enforce=True))
            """
        )
        pytester.path.joinpath("allowed.txt").write_text(allowed)
        pytester.makepyfile(
            f"import pytest\ndef test_one():\n    pytest.skip({reason!r})\ndef test_two():\n    pass\n"
        )
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)

    return run


def test_a_listed_reason_passes(run):
    assert run("s3fs is not installed", "# packages\ns3fs is not installed\n").ret == 0


def test_another_reason_fails_and_is_named(run):
    result = run("it rains", "s3fs is not installed\nit rain\n")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*test_one: it rains"])


def test_the_whole_reason_must_match(run):
    assert run("minisign is not installed today", "minisign is not installed").ret == 1


def test_a_program_that_is_installed_is_no_reason(run):
    assert run("no shell", "no shell :: sh").ret == 1
    assert run("no shell", "no shell :: a-program-that-nobody-has").ret == 0


def test_the_end_says_what_would_run_them(run):
    result = run("no s3fs", "no s3fs :: make test-s3")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["skipped tests that would run with make test-s3 (1)"])


def test_reasons_come_from_the_workers_of_xdist_too(run):
    assert run("it rains", "", "-n", "1").ret == 1
