"""The page of `graft ui` on a large project: start, server time and size of views, memory with open streams.

Run: python benchmarks/web_page.py [--cases 10000] [--runs 1000] [--streams 20] [--stream-seconds 60]

Makes a project of that size, starts the command as a user does, and reads the time of each view from its
`Server-Timing` header: medians of all rounds, and the first request after the start. Streams stay open for
`--stream-seconds` (3600 for the long run) while the project changes every second; memory is that of the
server.
"""

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from web_project import make_project

from graftwork.api.project import open_project

ROUNDS = 9
FIRST_SCREEN_MS, FIRST_SCREEN_BYTES, START_SECONDS = 200.0, 300_000, 2.0
VIEWS = (
    "/",
    "/runs",
    "/evaluation",
    "/evaluation/cases",
    "/evaluation/cases?outcome=lost&text=fern",
    "/data",
    "/releases",
    "/captures",
)


class Browser:
    """A signed-in client on one connection."""

    def __init__(self, link: str) -> None:
        self.host = re.search(r"//([^/]+)/", link)[1]  # type: ignore[index]
        self.cookie = ""
        answer, _ = self._ask(link.partition(self.host)[2])
        self.cookie = answer.getheader("set-cookie", "").split(";")[0]

    def get(self, path: str) -> tuple[float, int]:
        """Milliseconds of the server, and bytes."""
        answer, body = self._ask(path)
        assert answer.status == 200, (path, answer.status)
        return float(re.search(r"dur=([\d.]+)", answer.getheader("server-timing", ""))[1]), len(body)  # type: ignore[index]

    def _ask(self, path: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self.host, timeout=120)
        connection.request("GET", path, headers={"cookie": self.cookie})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    def stream(self, until: threading.Event, counts: list[int], place: int) -> None:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        connection.request("GET", "/events", headers={"cookie": self.cookie})
        answer = connection.getresponse()
        while not until.is_set():
            counts[place] += answer.readline().startswith(b"event:")
        connection.close()


def start(folder: Path) -> tuple[subprocess.Popen[str], str, float]:
    began = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "graftwork.cli.main",
        "ui",
        "-C",
        str(folder),
        "--no-open",
        "--port",
        "0",
    ]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "400"}
    )
    assert server.stdout is not None
    link = server.stdout.readline().strip()
    return server, link, time.perf_counter() - began


def processor_ms(pid: int) -> float:
    """What the server computed so far: other work on the machine does not count."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1000 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_streams(
    browser: Browser, folder: Path, pid: int, *, streams: int, seconds: float
) -> dict[str, object]:
    until, counts = threading.Event(), [0] * streams
    threads = [
        threading.Thread(target=browser.stream, args=(until, counts, place), daemon=True)
        for place in range(streams)
    ]
    for thread in threads:
        thread.start()
    samples, began, number = [], time.monotonic(), 0
    with open_project(folder).open() as work:
        release = work.releases.entries()[0]
        while time.monotonic() - began < seconds:
            work.releases.note(release.id, f"change {number}", who="bench", when="2026-11-16T00:00:00+00:00")
            browser.get("/")
            samples.append(memory_mib(pid))
            number += 1
            time.sleep(1)
    until.set()
    third = max(len(samples) // 3, 1)
    return {
        "streams": streams,
        "seconds": round(time.monotonic() - began),
        "events_per_stream": statistics.median(counts),
        "memory_mib_first_third": round(statistics.median(samples[:third]), 1),
        "memory_mib_last_third": round(statistics.median(samples[-third:]), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--stream-seconds", type=float, default=60.0)
    parser.add_argument("--project", type=Path, help="Use this project instead of making one.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.project or Path(scratch) / "large"
        if asked.project is None:
            make_project(folder, cases=asked.cases, runs=asked.runs, captures=2000)
        server, link, seconds = start(folder)
        try:
            began = time.perf_counter()
            browser = Browser(link)
            first = {VIEWS[0]: browser.get(VIEWS[0])[0]}
            waited = time.perf_counter() - began
            first |= {path: browser.get(path)[0] for path in VIEWS[1:]}
            found: dict[str, object] = {
                "load": os.getloadavg()[0],
                "cases": asked.cases,
                "runs": asked.runs,
                "start_seconds": round(seconds, 2),
                "address_to_first_screen_seconds": round(waited, 2),
            }
            for path in VIEWS:
                before = processor_ms(server.pid)
                rounds = [browser.get(path) for _ in range(ROUNDS)]
                spent = (processor_ms(server.pid) - before) / ROUNDS
                found[path] = {
                    "first_ms": round(first[path], 1),
                    "median_ms": round(statistics.median(ms for ms, _ in rounds), 1),
                    "processor_ms": round(spent, 1),
                    "bytes": rounds[-1][1],
                }
            found["streams"] = measure_streams(
                browser, folder, server.pid, streams=asked.streams, seconds=asked.stream_seconds
            )
        finally:
            server.terminate()
            server.wait(20)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
