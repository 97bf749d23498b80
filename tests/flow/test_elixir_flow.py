"""The Elixir client of `examples/elixir`, with real Elixir: with a stand-in worker, and with real runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "elixir"
DRIVER = """
Enum.each(Path.wildcard(Path.join(System.fetch_env!("EXAMPLE"), "lib/*.ex")), &Code.require_file/1)
graft = System.fetch_env!("GRAFT") |> String.split(" ")
options = [project: System.fetch_env!("PROJECT"), graft: graft, silence_ms: 120_000, window: 16]
{:ok, _} = Graft.TrainingCoordinator.start_link(options)
:ok = Graft.TrainingCoordinator.run()

follow = fn follow ->
  run = Graft.TrainingCoordinator.status()
  IO.puts(Graft.JSON.encode(%{run | result: run.result || %{}, error: run.error || %{}}))
  if run.state == :running, do: Process.sleep(100) && follow.(follow)
end

follow.(follow)
"""


@pytest.fixture(scope="module")
def elixir():
    if shutil.which("elixir") is None:
        pytest.skip("Elixir is not installed")
    return {"LC_ALL": "C.UTF-8", "MIX_ENV": "test"}


def test_the_client_keeps_its_promises_with_a_stand_in_worker(elixir, tmp_path):
    """Runs the client's own tests: framing, restart, poison limit, silence, cancel, closing the port."""
    copy = tmp_path / "elixir"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("_build"))
    done = subprocess.run(
        ["mix", "test"],
        cwd=copy,
        env={**os.environ, **elixir, "PYTHON": sys.executable, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "0 failures" in done.stdout


class Driver:
    """A BEAM that drives a run; `status` is the last state that it printed."""

    def __init__(self, folder, environment):
        script = folder.parent / "drive.exs"
        script.write_text(DRIVER)
        graft = f"{sys.executable} -m graftwork.cli.main"
        values = {"EXAMPLE": str(EXAMPLE), "PROJECT": str(folder), "GRAFT": graft, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            ["elixir", str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **environment, **values},
            start_new_session=True,
        )

    def until(self, check):
        status = None
        for line in self.process.stdout:
            if not line.startswith("{"):
                # The logger of Elixir reports a worker that was killed.
                continue
            status = json.loads(line)
            if check(status):
                return status
        raise AssertionError(f"the driver ended: {status}")

    def kill(self):
        """The BEAM alone, as a crash of the machine's service would."""
        os.kill(self.process.pid, signal.SIGKILL)
        for path in Path("/proc").glob("[0-9]*/stat"):
            # `elixir` is a script that becomes the BEAM; helpers of the same session end with it.
            try:
                fields = path.read_text().rsplit(") ", 1)[1].split()
                name = (path.parent / "comm").read_text()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and "beam" in name:
                os.kill(int(path.parent.name), signal.SIGKILL)
        self.process.wait()


def run_state(folder):
    from graftwork.project.folder import open_project
    from graftwork.project.open_project import use_project
    from graftwork.project.reporter import NullReporter

    with use_project(open_project(folder), NullReporter()) as work:
        return work.runs.list()[0].state


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_two_processes_survives_the_death_of_a_rank_the_worker_and_the_beam(
    elixir, small_project, tmp_path
):
    from test_distributed_flow import ranks

    path = small_project / "graft.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["train"] |= {"strategy": "ddp", "processes": 2, "epochs": 30}
    path.write_text(yaml.safe_dump(settings))

    first = Driver(small_project, elixir)
    first.until(lambda run: run["checkpoint"])
    (rank,) = ranks(small_project, 1)
    os.kill(rank, signal.SIGKILL)
    # The supervisor inside graft starts both ranks again; the BEAM sees no more than a pause.
    reached = first.until(lambda run: rank not in ranks(small_project, 1) and ranks(small_project, 1))
    assert reached["restarts"] == 0
    reached = first.until(lambda run: run["checkpoint"] > reached["checkpoint"])
    os.kill(int(reached["pid"]), signal.SIGKILL)
    again = first.until(lambda run: run["restarts"] == 1 and run["checkpoint"] > reached["checkpoint"])
    first.kill()
    until = time.monotonic() + 120
    while run_state(small_project) == "running":
        assert time.monotonic() < until
        time.sleep(0.2)
    assert run_state(small_project) == "stopped"

    last = Driver(small_project, elixir)
    ended = last.until(lambda run: run["state"] == "done")
    assert ended["result"]["steps"] > again["checkpoint"]
    assert Path(ended["result"]["adapter_folder"]).is_dir()
    assert last.process.wait(timeout=300) == 0
