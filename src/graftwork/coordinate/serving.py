"""Wire a project's releases to an endpoint: aliases from the store, captures into it.

In: an open workplace. Out: a running endpoint, in this thread or beside it. The model itself runs in
a child process of the serve stage; this side stays free of torch.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from graftwork.coordinate.sight import load_template
from graftwork.coordinate.workplace import Workplace
from graftwork.records.capture import Capture
from graftwork.records.errors import GraftError, UserMistake, WorkerFailed
from graftwork.records.release import Release
from graftwork.registry.folder import release_folder, verify_release
from graftwork.serve.jobs import EngineJob
from graftwork.serve.settings import ServeSettings

READY_SECONDS = 120.0


class StoreSink:
    """Captures go into the project's store, which is how they become data again."""

    def __init__(self, work: Workplace) -> None:
        self._captures = work.captures

    def add_many(self, captures: list[Capture]) -> None:
        self._captures.add(captures)


def engine_job(work: Workplace) -> EngineJob:
    """The base and every release that an alias points at, each verified byte by byte."""
    live = [work.releases.get(release_id) for release_id in sorted(set(work.releases.aliases().values()))]
    template = load_template(work).template_fingerprint
    for release in live:
        _require_same_ground(work, release, template)
    return EngineJob(
        folder=str(work.project.serving),
        base_folder=work.base.folder,
        template_fingerprint=template,
        reasoning=work.settings.data.reasoning == "keep",
        adapters={release.id: str(_verified(work, release)) for release in live},
    )


def serve_here(
    work: Workplace,
    settings: ServeSettings,
    *,
    on_ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until a signal comes, or `stop` is set."""
    from graftwork.serve.run import run, serve

    job = engine_job(work)
    sink = StoreSink(work) if settings.capture else None
    run(
        serve(
            settings,
            engine_job=job,
            sink=sink,
            resolve_alias=work.releases.aliases,
            on_ready=on_ready,
            stop=stop,
            find_adapter=lambda release_id: str(_verified(work, work.releases.get(release_id))),
        )
    )


@contextmanager
def served_beside(work: Workplace, settings: ServeSettings) -> Iterator[str]:
    """An endpoint in a thread of its own while the block runs; its URL."""
    ready, url, failure = threading.Event(), list[str](), list[BaseException]()
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def answer(address: str) -> None:
        url.append(address)
        ready.set()

    async def main() -> None:
        from graftwork.serve.run import serve

        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        await serve(
            settings,
            engine_job=engine_job(work),
            sink=StoreSink(work),
            resolve_alias=work.releases.aliases,
            on_ready=answer,
            stop=stop,
        )

    def run_thread() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # handed to the caller's thread, which raises it
            failure.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run_thread, name="serving", daemon=True)
    thread.start()
    try:
        if not ready.wait(READY_SECONDS) or failure or not url:
            raise _not_ready(failure)
        yield url[0]
    finally:
        for loop, stop in loops:
            if not loop.is_closed():
                loop.call_soon_threadsafe(stop.set)
        thread.join()


def _verified(work: Workplace, release: Release) -> Path:
    """The release's folder, every byte checked; it is a plain adapter folder."""
    folder = release_folder(work.project.releases, release.id)
    verify_release(folder)
    return folder


def _require_same_ground(work: Workplace, release: Release, template: str) -> None:
    """An adapter answers rightly only on the base and the template that it was trained with."""
    if release.base_fingerprint != work.base.revision:
        raise UserMistake(
            f"release {release.id[:12]} was trained on another base",
            why=f"it needs {release.base} with revision {release.base_fingerprint[:12]}",
            fix="set `base` in graft.yaml to that model, or release a new adapter",
        )
    if release.template_fingerprint != template:
        raise UserMistake(
            f"release {release.id[:12]} was trained with another chat template",
            why="asked in another form than it was trained in, the model answers badly",
            fix="restore the template of the base model, or prepare and train anew",
        )


def _not_ready(failure: list[BaseException]) -> BaseException:
    if failure and isinstance(failure[0], GraftError):
        return failure[0]
    if failure:
        return failure[0]
    return WorkerFailed(
        "the endpoint did not come up in time",
        why=f"it had {READY_SECONDS:.0f} s",
        fix="look at .graft/serving/engine.log",
    )
