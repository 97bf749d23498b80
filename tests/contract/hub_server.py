"""A small Hub: repositories, preupload, LFS, commits, tags and downloads over HTTP, kept in memory.

It answers as the real one does as far as the client asks, and remembers what it was asked and sent.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_a-token-that-nobody-may-say"


class SmallHub:
    """The state of the server. `broken` names a kind of request that fails until it is cleared."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.tags: dict[tuple[str, str], str] = {}
        self.large: dict[str, bytes] = {}
        self.is_large: dict[bytes, bool] = {}
        self.uploads: list[str] = []
        self.inline: list[str] = []
        self.asked: list[str] = []
        self.broken: str | None = None
        self.unauthorized = 0
        self.public = False
        self.gated: set[str] = set()
        self.cuts: list[int] = []
        """After how many bytes of a large file the connection breaks; each only once."""
        self.corrupt: set[str] = set()
        self.ranges: list[str] = []
        self.url = ""

    def head(self, repository: str) -> str:
        return list(self.repositories[repository])[-1]

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        body = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
        oid = hashlib.sha1(f"{len(self.repositories[repository])}{body}".encode()).hexdigest()
        self.repositories[repository][oid] = files
        return oid

    def find(self, repository: str, revision: str) -> str:
        commits = self.repositories[repository]
        if revision == "main":
            return self.head(repository)
        return self.tags.get((repository, revision), revision if revision in commits else "")


def goes_to_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def describe(name: str, data: bytes) -> dict[str, object]:
    if not goes_to_lfs(name):
        return {"size": len(data), "blobId": git_hash(data)}
    sha256 = hashlib.sha256(data).hexdigest()
    lfs = {"sha256": sha256, "size": len(data), "pointerSize": 130}
    return {"size": len(data), "blobId": git_hash(sha256.encode()), "lfs": lfs}


class Handler(BaseHTTPRequestHandler):
    hub: SmallHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_arguments: object) -> None:
        pass

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("transfer-encoding", ""):
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _say(
        self, body: object = None, *, status: int = 200, data: bytes | None = None, **headers: str
    ) -> None:
        content = data if data is not None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _answer(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        self.hub.asked.append(path)
        if self.hub.broken and re.search(self.hub.broken, path):
            return self._say({"error": "broken"}, status=400)
        named = re.match(r"/(?:api/models/)?([\w.-]+/[\w.-]+)", path)
        if named and named[1] in self.hub.gated:
            return self._say({"error": "gated"}, status=403, X_Error_Code="GatedRepo")
        allowed = self.hub.public or self.headers.get("authorization") == f"Bearer {TOKEN}"
        if not path.startswith("/lfs/") and not allowed:
            self.hub.unauthorized += 1
            return self._say({"error": "Invalid credentials"}, status=401)
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method.split():
                return answer(self, body, *match.groups())
        return self._say({"error": f"no such page: {self.command} {path}"}, status=404)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        there = name in self.hub.repositories
        if not there:
            self.hub.repositories[name] = {}
            self.hub.commit(name, {})
        self._say({"url": f"{self.hub.url}/{name}", "name": name}, status=409 if there else 200)

    def info(self, _body: bytes, repository: str, revision: str = "main") -> None:
        if repository not in self.hub.repositories:
            return self._say({"error": "Not found"}, status=404, X_Error_Code="RepoNotFound")
        if not self.hub.find(repository, revision):
            return self._say({"error": "Not found"}, status=404, X_Error_Code="RevisionNotFound")
        sha = self.hub.find(repository, revision)
        files = self.hub.repositories[repository][sha]
        siblings = [{"rfilename": name, **describe(name, data)} for name, data in files.items()]
        return self._say({"id": repository, "sha": sha, "siblings": siblings, "tags": [], "private": True})

    def preupload(self, body: bytes, repository: str, _revision: str) -> None:
        there = self.hub.repositories[repository][self.hub.head(repository)]
        files = []
        for file in json.loads(body)["files"]:
            name = file["path"]
            data = there.get(name)
            lfs = goes_to_lfs(name)
            oid = None if data is None else hashlib.sha256(data).hexdigest() if lfs else git_hash(data)
            mode = "lfs" if lfs else "regular"
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._say({"files": files})

    def batch(self, body: bytes, _repository: str) -> None:
        objects = []
        for found in json.loads(body)["objects"]:
            answer = {"oid": found["oid"], "size": found["size"]}
            if found["oid"] not in self.hub.large:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{found['oid']}"}}
            objects.append(answer)
        self._say({"transfer": "basic", "objects": objects})

    def receive(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._say({"error": "other bytes"}, status=422)
        self.hub.uploads.append(oid)
        self.hub.large[oid] = body
        return self._say({})

    def commit(self, body: bytes, repository: str, _revision: str) -> None:
        files = dict(self.hub.repositories[repository][self.hub.head(repository)])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.hub.inline.append(value["path"])
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        oid = self.hub.commit(repository, files)
        self._say(
            {"commitUrl": f"{self.hub.url}/{repository}/commit/{oid}", "commitOid": oid, "success": True}
        )

    def tag(self, body: bytes, repository: str, revision: str) -> None:
        name = json.loads(body)["tag"]
        there = (repository, name) in self.hub.tags
        self.hub.tags.setdefault((repository, name), self.hub.find(repository, revision))
        self._say({}, status=409 if there else 200)

    def untag(self, _body: bytes, repository: str, name: str) -> None:
        there = self.hub.tags.pop((repository, name), None)
        self._say({}, status=200 if there else 404)

    def refs(self, _body: bytes, repository: str) -> None:
        def say(kind: str, name: str, commit: str) -> dict[str, str]:
            return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit}

        tags = [say("tags", name, commit) for (of, name), commit in self.hub.tags.items() if of == repository]
        branches = [say("heads", "main", self.hub.head(repository))]
        self._say({"branches": branches, "converts": [], "tags": tags})

    def paths(self, body: bytes, repository: str, revision: str) -> None:
        try:
            names = json.loads(body)["paths"]
        except ValueError:
            from urllib.parse import parse_qs

            names = parse_qs(body.decode())["paths"]
        files = self.hub.repositories[repository][self.hub.find(repository, revision)]
        found = []
        for name in names:
            if name in files:
                data = files[name]
                info = {"type": "file", "path": name, "size": len(data), "oid": git_hash(data)}
                if goes_to_lfs(name):
                    info["lfs"] = {
                        "oid": hashlib.sha256(data).hexdigest(),
                        "size": len(data),
                        "pointerSize": 130,
                    }
                found.append(info)
        self._say(found)

    def resolve(self, _body: bytes, repository: str, revision: str, name: str) -> None:
        commit = self.hub.find(repository, revision)
        files = self.hub.repositories.get(repository, {}).get(commit, {})
        if name not in files:
            return self._say({"error": "Entry not found"}, status=404, X_Error_Code="EntryNotFound")
        data = files[name]
        etag = hashlib.sha256(data).hexdigest() if goes_to_lfs(name) else git_hash(data)
        headers = {"X_Repo_Commit": commit, "ETag": f'"{etag}"', "Accept_Ranges": "bytes"}
        if name in self.hub.corrupt:
            data = bytes(byte ^ 1 for byte in data)
        start = 0
        asked = self.headers.get("range")
        if asked and self.command == "GET":
            self.hub.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and goes_to_lfs(name) and self.hub.cuts:
            return self._break(data[start:], self.hub.cuts.pop(0), headers)
        return self._say(data=data[start:], status=206 if start else 200, **headers)

    def _break(self, data: bytes, after: int, headers: dict[str, str]) -> None:
        """Send a part of a file, then close the connection."""
        self.send_response(206 if "Content_Range" in headers else 200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:after])
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def fine(self, _body: bytes) -> None:
        self._say({"errors": [], "warnings": []})


_REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.fine),
    ("GET", rf"/api/models/{_REPO}", Handler.info),
    ("GET", rf"/api/models/{_REPO}/revision/([^/]+)", Handler.info),
    ("POST", rf"/api/models/{_REPO}/preupload/([^/]+)", Handler.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/([^/]+)", Handler.commit),
    ("POST", rf"/api/models/{_REPO}/tag/([^/]+)", Handler.tag),
    ("DELETE", rf"/api/models/{_REPO}/tag/([^/]+)", Handler.untag),
    ("GET", rf"/api/models/{_REPO}/refs", Handler.refs),
    ("POST", rf"/api/models/{_REPO}/paths-info/([^/]+)", Handler.paths),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", Handler.receive),
    ("GET HEAD", rf"/{_REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
)


@contextmanager
def running_hub() -> Iterator[SmallHub]:
    hub = SmallHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
