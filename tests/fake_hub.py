"""A hub on this machine: real huggingface_hub code against a server whose repositories are folders."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from huggingface_hub import constants

COMMIT = "a" * 40


@contextmanager
def serve(monkeypatch: Any, tmp_path: Path, repositories: dict[str, Path | int]):
    """Serve `owner/name` -> folder, or an HTTP status that refuses it; yields the names of files that were sent.

    The status 403 stands for a gated repository, whose listing is open and whose files are not; 0 for a connection
    that breaks in the middle of a file.
    """
    sent: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(head=True)

        def do_GET(self) -> None:
            self.answer(head=False)

        def answer(self, head: bool) -> None:
            parts = unquote(urlparse(self.path).path).strip("/").removeprefix("api/models/").split("/")
            what = repositories.get("/".join(parts[:2]), 401)
            folder = what if isinstance(what, Path) else next(
                (path for path in repositories.values() if isinstance(path, Path)), tmp_path)
            if what in (401, 500):
                return self.reply(what, b"{}", {"X-Error-Code": "RepoNotFound"} if what == 401 else {})
            if parts[2] == "resolve" and what == 403:
                return self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
            if parts[2] == "revision":
                return self.reply(200, json.dumps({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": []}).encode())
            if parts[2] == "tree":
                files = [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "b" * 40}
                         for path in sorted(folder.iterdir())]
                return self.reply(200, json.dumps(files).encode())
            path = folder / parts[4]
            if not path.is_file():
                return self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            data = path.read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            if head:
                return self.reply(200, data, headers, body=False)
            if asked := self.headers.get("Range"):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                data = data[int(first) : int(last or len(data)) + 1]
            else:
                sent.append(path.name)
            return self.reply(206 if asked else 200, data, headers, cut=what == 0)

        def reply(self, status: int, data: bytes, headers: dict | None = None, body: bool = True, cut: bool = False
                  ) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body and self.command == "GET":
                self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    point_to(monkeypatch, tmp_path, f"http://127.0.0.1:{server.server_port}")
    try:
        yield sent
    finally:
        server.shutdown()
        server.server_close()


def point_to(monkeypatch: Any, tmp_path: Path, url: str) -> None:
    """Make huggingface_hub ask `url`, with a cache of its own and no token."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):  # what is late is not asked for twice
        monkeypatch.setattr(constants, name, 300)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
