"""`graft fleet`: run this project's training at other places, follow it, and keep its cost in a ledger.

`fleet simulate` brings up simulated hosts, runs a command on the first one, and ends them.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, Model, opened, opened_with_progress, print_record, reporting
from graftwork.cli.output import Json, print_json, stderr, stdout
from graftwork.records.errors import EXIT_NEGATIVE_RESULT

if TYPE_CHECKING:
    from graftwork.fleet.jobs import FleetRequest, RunQuote
    from graftwork.fleet.simulated_hosts import HostNetwork
    from graftwork.project.open_project import OpenProject

PlaceName = Annotated[
    str,
    typer.Option("--place", help="auto, local, ssh, ssh:HOST, or another from `graft fleet places`."),
]
MaxUsd = Annotated[
    float | None,
    typer.Option(
        "--max-usd", "--budget", min=0, help="The most the job may cost. Default: fleet.caps.job_usd."
    ),
]
Deadline = Annotated[
    str | None, typer.Option("--deadline", help="Stop with a checkpoint after this long: 90m, 12h.")
]
GpuOption = Annotated[str, typer.Option("--gpu", help="The GPU to order, as `graft fleet offers` names it.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before money is spent.")]
JobId = Annotated[str, typer.Argument(help="A job id from `graft fleet list`, or its first characters.")]

app = typer.Typer(no_args_is_help=True, help="Run training at other places, with a ledger of jobs and costs.")


@app.command("places")
def places(project: Folder = None, json: Json = False) -> None:
    """List the configured places: whether they answer, their GPUs and prices, open jobs.

    Example:  graft fleet places
    """
    from graftwork.fleet.project import list_places

    with opened(project) as work:
        found = list_places(work)
    print_record(found, as_json=json)


@app.command("offers")
def offers(
    place: PlaceName = "",
    run: Annotated[
        bool, typer.Option("--run/--prices", help="Plan this project's run there, or list prices only.")
    ] = True,
    max_usd: MaxUsd = None,
    deadline: Deadline = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Show what this project's run would take and cost at each place, planned for the machines there.

    Example:  graft fleet offers --run
    """
    from graftwork.fleet.jobs import FleetRequest, list_offers
    from graftwork.fleet.project import list_places

    if not run:
        with opened(project) as work:
            prices = list_places(work, only=place)
        print_record(prices, as_json=json)
        return
    seconds = parse_duration(deadline) if deadline else None
    asked = FleetRequest("", max_usd=max_usd, deadline_seconds=seconds)
    with opened_with_progress(project, model) as work:
        found = list_offers(work, only=place, request=asked)
    print_record(found, as_json=json)


@app.command("run")
def run(
    place: PlaceName,
    max_usd: MaxUsd = None,
    deadline: Deadline = None,
    gpu: GpuOption = "",
    base: Annotated[str, typer.Option("--base", help="Folder of the base model at the place.")] = "",
    dataset: Annotated[
        str,
        typer.Option("--dataset", help="Folder of the dataset at the place, if it must not be copied there."),
    ] = "",
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start the job and return; `graft fleet list` shows it.")
    ] = False,
    yes: Yes = False,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Train at another place and fetch the result. A run that was stopped continues from its checkpoint.

    Shows the largest possible cost and asks before money is spent. Ctrl-C stops following, not the job.

    Example:  graft fleet run --place ssh:gpu1
    """
    from graftwork.fleet.jobs import FleetRequest

    request = FleetRequest(
        place=place,
        max_usd=max_usd,
        deadline_seconds=parse_duration(deadline) if deadline else None,
        gpu=gpu,
        base_there=base,
        dataset_there=dataset,
    )
    with reporting(project, model) as found, found.open() as work:
        run_at_place(work, request, yes=yes, detach=detach, as_json=json)


def run_at_place(
    work: "OpenProject", request: "FleetRequest", *, yes: bool, detach: bool, as_json: bool
) -> None:
    """Start the job, follow it and print the outcome of the training step."""
    from graftwork.fleet.jobs import AUTO, continue_job, finish, follow, require_done, start_run
    from graftwork.records.run import TrainOutcome

    job = continue_job(work, request.place)
    if job is None:
        if request.place == AUTO:
            request = choose_for(work, request)
        job = start_run(work, request, confirm=lambda quote: confirm_quote(quote, yes=yes))
    if detach or job.place == "manual":
        print_record(job, as_json=as_json)
        return
    job = follow(work, job)
    require_done(work, job)
    print_record(finish(work).get("train", TrainOutcome), as_json=as_json)


def choose_for(work: "OpenProject", request: "FleetRequest") -> "FleetRequest":
    """The request with the place that `--place auto` chooses; prints the reasons on standard error."""
    from graftwork.fleet.jobs import find_place

    best, why, refused = find_place(work, request)
    stderr.print(f"{best.named}: {why}", highlight=False, soft_wrap=True)
    for line in refused:
        stderr.print(f"  not {line}", highlight=False, soft_wrap=True)
    return replace(request, place=best.place, gpu=best.gpu)


def confirm_quote(quote: "RunQuote", *, yes: bool) -> bool:
    """Ask for confirmation on standard error if the job costs money."""

    if not quote.largest_usd:
        return True
    stderr.print(
        f"{quote.place}, {quote.gpu or 'no GPU'}: ${quote.usd_per_hour:.3f} an hour "
        f"({quote.price_source}, {quote.price_dated}); planned ${quote.planned_usd:.2f}, "
        f"at most ${quote.largest_usd:.2f} for {quote.seconds / 3600:.1f} h and the reserve",
        highlight=False,
    )
    return yes or typer.confirm("Start it?", default=False, err=True)


@app.command("list")
def list_jobs(
    everything: Annotated[bool, typer.Option("--all", help="Also list jobs that have ended.")] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """List the jobs at other places with their state and cost.

    Example:  graft fleet list --all
    """
    from graftwork.fleet.jobs import FleetJobs

    with opened(project) as work:
        jobs = tuple(job for job in work.jobs.list() if everything or job.is_open)
    print_record(FleetJobs(jobs=jobs), as_json=json)


@app.command("logs")
def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new output until it ends.")] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Print the output of a job.

    Example:  graft fleet logs 4f1c -f
    """
    import sys

    from graftwork.fleet.jobs import follow_log, get_job, read_log

    with opened(project) as work:
        found, text = get_job(work, job), ""
        for added in follow_log(work, found) if follow else [read_log(work, found)]:
            text += added
            if not json:
                sys.stdout.write(added)
                sys.stdout.flush()
        found = get_job(work, job)
    if json:
        print_json({"job": found.id, "state": found.state, "log": text})


@app.command("stop")
def stop(
    job: JobId,
    now: Annotated[
        bool, typer.Option("--now", help="End the machine at once, without a last checkpoint.")
    ] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Stop a job at its next checkpoint; `graft fleet run` continues from there, at this place or another.

    Example:  graft fleet stop 4f1c
    """
    from graftwork.fleet.jobs import get_job
    from graftwork.fleet.jobs import stop as stop_job

    with opened(project) as work:
        found = stop_job(work, get_job(work, job), at_once=now)
    print_record(found, as_json=json)


@app.command("fetch")
def fetch(
    job: JobId,
    results: Annotated[
        Path | None,
        typer.Argument(help="For a job that was run manually: its results.zip, or its work folder."),
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Fetch the files of a job into the folder of its run. For a job at `manual`, pass RESULTS.

    Example:  graft fleet fetch 4f1c
    Example:  graft fleet fetch 4f1c results.zip
    """
    from graftwork.fleet import jobs as fleet_jobs

    with opened(project) as work:
        if results is not None:
            found = fleet_jobs.receive(work, fleet_jobs.get_job(work, job), results)
        else:
            fleet_jobs.reconcile(work)
            found = fleet_jobs.fetch(work, fleet_jobs.get_job(work, job))
    print_record(found, as_json=json)


@app.command("reconcile")
def reconcile(project: Folder = None, json: Json = False) -> None:
    """Compare the ledger with what exists at the places, and end orphaned machines.

    Run it every few minutes, from cron, while paid jobs are open. Exit code 1: a place did not answer.

    Example:  graft fleet reconcile
    """
    from graftwork.fleet.jobs import reconcile as reconcile_all

    with opened(project) as work:
        found = reconcile_all(work)
    print_record(found, as_json=json)
    if found.unreachable:
        raise typer.Exit(EXIT_NEGATIVE_RESULT)


@app.command("ledger")
def ledger(
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write all jobs as CSV to this file; - for standard output.")
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Show planned, reserved and actual cost of all jobs, and what the caps leave.

    Example:  graft fleet ledger --csv costs.csv
    """
    import sys

    from graftwork.fleet.control import export_csv
    from graftwork.fleet.jobs import summarize_costs

    with opened(project) as work:
        jobs, summary = work.jobs.list(), summarize_costs(work)
    if csv is not None and str(csv) == "-":
        sys.stdout.write(export_csv(jobs))
        return
    if csv is not None:
        from graftwork.files.disk import write_atomic

        write_atomic(csv.absolute(), export_csv(jobs))
    print_record(summary, as_json=json)


@app.command("bundle")
def bundle(
    to: Annotated[Path, typer.Option("--to", help="Folder to create; it must not exist yet.")],
    base: Annotated[str, typer.Option("--base", help="Folder of the base model at the place.")] = "",
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Write the bundle of this project's run: `python bootstrap.py --work FOLDER` runs it anywhere.

    Example:  graft fleet bundle --to bundle/
    """
    from graftwork.fleet.jobs import export_bundle

    with opened_with_progress(project, model) as work:
        found = export_bundle(work, to.absolute(), base_there=base)
    print_record(found, as_json=json)


@app.command("image")
def image(
    to: Annotated[Path, typer.Option("--to", help="Folder to create; it must not exist yet.")],
    base: Annotated[str, typer.Option("--from", help="Image to build on, with Python 3.11 or later.")] = "",
    extra: Annotated[
        list[str] | None,
        typer.Option("--extra", help="Also install this extra of graftwork, such as sagemaker."),
    ] = None,
    json: Json = False,
) -> None:
    """Write a Dockerfile, pinned requirements and the wheel, for places that run containers.

    Example:  graft fleet image --to image/
    """
    from graftwork.fleet.bundle import BASE_IMAGE, write_image

    print_record(write_image(to.absolute(), image=base or BASE_IMAGE, extras=extra or ()), as_json=json)


def parse_duration(text: str) -> float:
    """Parse 90m, 12h or 2d to seconds."""
    units = {"m": 60.0, "h": 3600.0, "d": 86400.0}
    try:
        seconds = float(text[:-1]) * units[text[-1:]]
    except (ValueError, KeyError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise typer.BadParameter("write it like 90m, 12h or 2d", param_hint="--deadline")
    return seconds


@app.command("simulate", context_settings={"ignore_unknown_options": True})
def simulate(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Run this on h1, then end the hosts. Default: until Ctrl-C."),
    ] = None,
    hosts: Annotated[int, typer.Option("--hosts", min=1, max=8, help="Number of hosts.")] = 3,
    share: Annotated[
        list[Path] | None,
        typer.Option("--share", help="Folder below /tmp that all hosts share. Others are shared already."),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Start a Ray node on each host.")] = True,
    slurm: Annotated[bool, typer.Option("--slurm/--no-slurm", help="Start Slurm on the hosts.")] = True,
    netem: Annotated[
        str,
        typer.Option(
            "--netem", help='Network fault to apply to every link, in tc netem syntax: "delay 50ms loss 1%".'
        ),
    ] = "",
    kill: Annotated[
        list[str] | None, typer.Option("--kill", help="HOST=SECONDS: kill this host after this many seconds.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate several hosts on this machine, with sshd, Ray and Slurm. Linux, root.

    Each host has an address, a host name, processes and a /tmp of its own. Nothing outside changes.

    Example:  graft fleet simulate --hosts 3 -- graft data prepare --engine ray
    """
    from graftwork.fleet.simulated_hosts import HostNetwork, run_on_first_host, start_services

    kills = [_parse_kill(text) for text in kill or ()]
    with HostNetwork(hosts, share=tuple(share or ())) as network:
        environment = start_services(network, ray=ray, slurm=slurm, on_info=_say)
        for name in network.hosts if netem else ():
            network.disturb(name, netem)
        _print_hosts(network, environment, as_json=json and not command)
        if not command:
            _say("Ctrl-C ends the hosts.")
        code = run_on_first_host(network, command or [], environment, kills=kills)
    raise typer.Exit(code)


def _parse_kill(text: str) -> tuple[str, float]:
    host, _, seconds = text.partition("=")
    try:
        return host, float(seconds)
    except ValueError:
        raise typer.BadParameter("write it like h3=20", param_hint="--kill") from None


def _say(text: str) -> None:
    stderr.print(text, highlight=False, markup=False)


def _print_hosts(network: "HostNetwork", environment: dict[str, str], *, as_json: bool) -> None:
    hosts = [{"name": host.name, "address": host.address, "pid": host.pid} for host in network.hosts.values()]
    if as_json:
        print_json({"hosts": hosts, "environment": environment, "folder": str(network.state)})
        sys.stdout.flush()
        return
    for host in hosts:
        stderr.print(f"  {host['name']}  {host['address']}  nsenter -t {host['pid']} -a", highlight=False)
    for name, value in sorted(environment.items()):
        if name.startswith(("GRAFT", "SLURM", "RAY_AUTH")):
            stderr.print(f"  export {name}='{value}'", highlight=False, soft_wrap=True)
    stdout.file.flush()
