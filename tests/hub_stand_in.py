"""Datasets of the hub on this machine.

One repository, its commits, and ranges of the bytes of its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

NAME = "someone/rows"


class DatasetHub:
    """What the stand-in has and was asked.

    Attributes:
        commits: Sha to the files of that commit.
        main: The sha that `main` is at.
        sent: Bytes of each file that went out, by path.
        lies: Path to other bytes that are sent in place of its own.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.main = ""
        self.sent: dict[str, int] = {}
        self.lies: dict[str, bytes] = {}
        self.silent = False

    def commit(self, files: dict[str, bytes]) -> str:
        """Make these the files of `main`."""
        self.main = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[self.main] = files
        return self.main

    def files(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Sha and files of a revision."""
        sha = self.main if revision == "main" else revision
        return (sha, self.commits[sha]) if sha in self.commits else None


def _entry(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if path.endswith(".parquet"):
        pointer = {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 130,
        }
        found["lfs"] = pointer
    return found


class _Answers(BaseHTTPRequestHandler):
    hub: DatasetHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, values: Any, code: int = 200, **headers: str) -> None:
        self._send(
            code, json.dumps(values).encode(), {"Content-Type": "application/json", **headers}
        )

    def _missing(self, what: str) -> None:
        self._json({"error": "not found"}, 404, **{"X-Error-Code": what})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        """Tell of the repository, its tree, or give a file."""
        body = self._body()
        path = unquote(urlsplit(self.path).path).strip("/")
        if not path:
            self._json({})
            return
        if self.hub.silent:
            self._json({"error": "gone"}, 404)
            return
        for begin, act in (
            (f"api/datasets/{NAME}/tree/", self._tree),
            (f"api/datasets/{NAME}/paths-info/", lambda rest: self._paths(rest, body)),
            (f"api/datasets/{NAME}/revision/", self._info),
            (f"datasets/{NAME}/resolve/", self._file),
        ):
            if path.startswith(begin):
                act(path.removeprefix(begin))
                return
        if path == f"api/datasets/{NAME}":
            self._info("main")
        else:
            self._missing("RepoNotFound")

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        found = self.hub.files(revision)
        if found is None:
            self._missing("RevisionNotFound")
        return found

    def _info(self, revision: str) -> None:
        if (at := self._at(revision)) is not None:
            self._json(
                {
                    "id": NAME,
                    "sha": at[0],
                    "siblings": [{"rfilename": path} for path in at[1]],
                    "tags": [],
                }
            )

    def _tree(self, rest: str) -> None:
        revision, _, folder = rest.partition("/")
        if (at := self._at(revision)) is None:
            return
        recursive = "recursive=true" in urlsplit(self.path).query.lower()
        inside = {
            path: path.removeprefix(f"{folder}/")
            for path in at[1]
            if not folder or path.startswith(f"{folder}/")
        }
        files = [
            _entry(path, at[1][path])
            for path, rest in inside.items()
            if recursive or "/" not in rest
        ]
        below = {
            path[: len(path) - len(rest)] + rest.split("/")[0]
            for path, rest in inside.items()
            if "/" in rest
        }
        folders = [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            for path in sorted(below)
        ]
        self._json(folders + files) if inside else self._missing("EntryNotFound")

    def _paths(self, revision: str, body: bytes) -> None:
        if (at := self._at(revision)) is None:
            return
        asked = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
        found = [_entry(path, at[1][path]) for path in asked if path in at[1]]
        folders = [path for path in asked if any(name.startswith(f"{path}/") for name in at[1])]
        self._json(
            found
            + [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders]
        )

    def _file(self, rest: str) -> None:
        revision, _, path = rest.partition("/")
        if (at := self._at(revision)) is None:
            return
        if path not in at[1]:
            self._missing("EntryNotFound")
            return
        content = self.hub.lies.get(path, at[1][path])
        headers = {
            "ETag": f'"{_entry(path, at[1][path])["oid"]}"',
            "X-Repo-Commit": at[0],
            "Accept-Ranges": "bytes",
        }
        asked = self.headers.get("Range")
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last or len(content) - 1), len(content) - 1) + 1
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            content = content[begin:end]
        if self.command != "HEAD":
            self.hub.sent[path] = self.hub.sent.get(path, 0) + len(content)
        self._send(206 if asked else 200, content, headers)


@contextmanager
def served(hub: DatasetHub) -> Iterator[dict[str, str]]:
    """The environment of a process that asks the stand-in."""
    handler = type("Answers", (_Answers,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    local = {
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
    }
    local |= {"HF_UPDATE_DOWNLOAD_COUNTS": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        yield {**os.environ, **local, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    finally:
        server.shutdown()
        server.server_close()
