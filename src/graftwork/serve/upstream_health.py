"""Probes the server behind an engine process: does it answer at all?

In: a client and an interval. Out: why it is unreachable, or an empty string. Any answer below 500 is a sign
of life: some servers have no list of models, and a wrong key shows in the answers themselves. A server that
was started here and has ended, or stays silent, ends this process with it; the supervisor starts both again.
"""

import asyncio
import logging
import os
import signal

from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.http_messages import name_failure
from graftwork.serve.upstream_client import UpstreamClient
from graftwork.serve.upstream_server import UpstreamServer

log = logging.getLogger(__name__)


class UpstreamHealth:
    """Call `start` once the server has answered; read `reason`; call `stop`."""

    def __init__(self, client: UpstreamClient, job: EngineJob, server: UpstreamServer | None = None) -> None:
        self._client, self._job, self._server = client, job, server
        self._task: asyncio.Task[None] | None = None
        self.reason = ""
        """Why the server is unreachable; empty while it answers."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        answered = clock()
        while True:
            await asyncio.sleep(self._job.probe_seconds)
            self.reason = await self._probe()
            if not self.reason:
                answered = clock()
            if self._server is None:
                continue
            if self._server.ended or clock() - answered >= self._job.restart_seconds:
                log.warning("engine: %s; ending with it", self.reason or "its server has ended")
                os.kill(os.getpid(), signal.SIGTERM)
                return

    async def _probe(self) -> str:
        patience = 2 * self._job.probe_seconds
        try:
            async with asyncio.timeout(patience):
                reply = await self._client.get("/models")
                reply.close()
        except TimeoutError:
            return f"its server has not answered for {patience:g} s"
        except OSError as error:
            return f"its server cannot be reached: {name_failure(error)}"
        return f"its server answers with status {reply.status}" if reply.status >= 500 else ""
