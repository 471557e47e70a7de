"""A Hugging Face hub on localhost that the real client reads from and writes to: repositories of
any kind and name, commits, branches, tags, large files by git LFS's protocol."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

Files = dict[str, bytes]


@dataclass
class Repository:
    """Commits by their names, and the branches and tags that point to one."""

    private: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: Files) -> str:
        text = repr((len(self.commits), sorted(files.items()))).encode()
        name = hashlib.sha1(text).hexdigest()
        self.commits[name] = files
        self.refs[branch] = name
        return name

    def find(self, revision: str) -> str | None:
        named = self.refs | self.tags
        return revision if revision in self.commits else named.get(revision)

    @property
    def main(self) -> Files:
        return self.commits[self.refs["main"]]


@dataclass
class Hub:
    """Repositories by "models/org/name" and "datasets/org/name", requests as they came, and whether
    uploads are refused (no token that may write)."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    refuses: bool = False
    url: str = ""

    def add(self, name: str, files: Files, branch: str = "main") -> str:
        """A commit of these files, whose name is returned."""
        return self.repositories.setdefault(name, Repository()).commit(branch, files)


@contextmanager
def writable_hub(cache: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub without repositories at first, which huggingface_hub talks to inside the block."""
    patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(b"")

        do_HEAD = do_DELETE = do_GET

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        do_PUT = do_POST

        def _answer(self, body: bytes) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            if path.startswith("/lfs/"):
                hub.objects[path.removeprefix("/lfs/")] = body
                return self._json({})
            if path == "/api/validate-yaml":
                return self._json({"errors": [], "warnings": []})
            if path == "/api/repos/create":
                return self._create(json.loads(body))
            if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
                return self._json({"objects": [_upload(hub.url, x) for x in _asked(body)]})
            if found := re.fullmatch(r"/api/((?:model|dataset)s/[^/]+/[^/]+)(?:/(.*))?", path):
                repository = hub.repositories.get(found[1])
                return self._api(found[1], repository, found[2] or "", body)
            found = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            if found is None:
                return self._send(404, b"{}")
            name = f"{found[1] or 'models/'}{found[2]}"
            return self._file(hub.repositories.get(name), found[3], found[4])

        def _create(self, asked: dict) -> None:
            name = f"{asked.get('type', 'model')}s/{asked['organization']}/{asked['name']}"
            if hub.refuses:
                return self._send(403, b"{}")
            page = {"url": f"{hub.url}/{name.removeprefix('models/')}"}
            if name in hub.repositories:
                return self._send(409, json.dumps({"error": "exists", **page}).encode())
            made = hub.repositories[name] = Repository(asked.get("visibility") == "private")
            made.commit("main", {".gitattributes": b""})
            return self._json(page)

        def _api(self, name: str, repository: Repository | None, rest: str, body: bytes) -> None:
            if repository is None:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            what, _, where = rest.partition("/")
            if what == "branch":
                known = where in repository.refs
                repository.refs.setdefault(where, repository.refs["main"])
                return self._send(409 if known else 200, b"{}")
            if what == "tag" and self.command == "DELETE":
                del repository.tags[where]
                return self._json({})
            if what == "tag":
                repository.tags[json.loads(body)["tag"]] = repository.refs[where]
                return self._json({})
            if what == "refs":
                listed = {
                    "branches": _refs("heads", repository.refs),
                    "tags": _refs("tags", repository.tags),
                    "converts": [],
                }
                return self._json(listed)
            commit = repository.find(where.partition("/")[0] or "main")
            if commit is None:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = repository.commits[commit]
            if what in ("", "revision"):
                return self._json({"id": name, "sha": commit, "siblings": []})
            if what == "tree":
                return self._json([_entry(n, x) for n, x in sorted(files.items())])
            if what == "preupload":
                asked = json.loads(body)["files"]
                return self._json({"files": [_mode(one) for one in asked]})
            assert what == "commit", rest
            made = repository.commit(where, _committed(hub, files, body))
            url = f"{hub.url}/{name.removeprefix('models/')}/commit/{made}"
            return self._json({"commitUrl": url, "commitOid": made})

        def _file(self, repository: Repository | None, revision: str, name: str) -> None:
            commit = repository.find(revision) if repository else None
            if repository is None or commit is None:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            content = repository.commits[commit].get(name)
            if content is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            etag = hashlib.sha1(content).hexdigest()
            return self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

        def _json(self, content: object) -> None:
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    template = "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _entry(name: str, content: bytes) -> dict[str, object]:
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": oid}


def _mode(asked: dict) -> dict[str, object]:
    mode = "lfs" if asked["size"] > 1000 else "regular"
    return {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}


def _asked(body: bytes) -> list[dict]:
    return json.loads(body)["objects"]


def _upload(url: str, asked: dict) -> dict[str, object]:
    actions = {"upload": {"href": f"{url}/lfs/{asked['oid']}"}}
    return {"oid": asked["oid"], "size": asked["size"], "actions": actions}


def _refs(kind: str, named: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": commit}
        for n, commit in named.items()
    ]


def _committed(hub: Hub, files: Files, body: bytes) -> Files:
    """The files after a commit, whose lines are JSON."""
    files = dict(files)
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            files[value["path"]] = hub.objects[value["oid"]]
        elif line["key"] == "deletedFile":
            del files[value["path"]]
    return files
