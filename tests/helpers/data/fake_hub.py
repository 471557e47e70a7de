"""A Hugging Face hub on localhost that serves one dataset repository, as far as reading goes."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

REPOSITORY = "org/set"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(root: Path, cache: Path, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serves the files under `root` as `hf://org/set`; yields the requests made, as they come."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/datasets/{REPOSITORY}/revision/"):
                self._json({"id": REPOSITORY, "sha": COMMIT, "siblings": []})
            elif path.startswith(f"/api/datasets/{REPOSITORY}/tree/{COMMIT}"):
                files = sorted(p for p in root.rglob("*") if p.is_file())
                self._json([_entry(p, p.relative_to(root).as_posix()) for p in files])
            else:
                file = root / path.removeprefix(f"/datasets/{REPOSITORY}/resolve/{COMMIT}/")
                if file.is_file():
                    self._send(200, file.read_bytes(), hashlib.sha1(file.read_bytes()).hexdigest())
                else:
                    self._send(404, b"", "none", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def _json(self, content: object) -> None:
            self._send(200, json.dumps(content).encode(), "json")

        def _send(
            self, status: int, body: bytes, etag: str, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            described = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, **(headers or {})}
            for name, value in {**described, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    template = "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield requests
    finally:
        server.shutdown()
        server.server_close()


def _entry(path: Path, name: str) -> dict[str, object]:
    oid = hashlib.sha1(path.read_bytes()).hexdigest()
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid}
