"""`optrun export ... push_to_hub=NAME` against a stand-in of the hub on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.running import TINY_GPT, optrun, write_text

NAME = "someone/my-model"


class Hub(BaseHTTPRequestHandler):
    """Takes repositories and commits, as the hub's HTTP interface does."""

    made: ClassVar[list[dict[str, Any]]] = []
    files: ClassVar[dict[str, bytes]] = {}
    refuses: ClassVar[bool] = False
    private: ClassVar[bool] = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self, values: Any, code: int = 200) -> None:
        body = json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        """Is there."""
        self._answer({})

    def do_GET(self) -> None:
        """Tell of a repository."""
        self._answer({"id": NAME, "sha": "0" * 40, "siblings": [], "private": self.private})

    def do_POST(self) -> None:
        """Take what is sent."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.refuses:
            self._answer({"error": "You have no right to write here"}, 403)
        elif self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            self._answer({"url": f"http://{self.headers['Host']}/{NAME}", "id": NAME})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            self._answer(
                {
                    "files": [
                        {"path": path, "uploadMode": "regular", "shouldIgnore": False}
                        for path in paths
                    ]
                }
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                {
                    "success": True,
                    "commitOid": "1" * 40,
                    "commitUrl": f"http://{self.headers['Host']}/{NAME}/commit/1",
                }
            )
        else:
            self._answer({})


@pytest.fixture
def hub() -> Iterator[dict[str, str]]:
    """Environment of a process that asks the stand-in."""
    Hub.made.clear()
    Hub.files.clear()
    Hub.refuses, Hub.private = False, True
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_TOKEN": "hf_word",
    }
    yield {**env, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("push")
    run = folder / "run"
    words = [*TINY_GPT, "data=files", f"data.train={write_text(folder)}", "training.max_steps=1"]
    assert optrun(*words, f"hydra.run.dir={run}") == 0
    return run


def export(run: Path, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Export in a process of its own: the hub's client reads its address when it is imported."""
    command = [sys.executable, "-m", "optrun", "export", str(run), *words]
    return subprocess.run(
        command, env=env, cwd=run.parent, text=True, capture_output=True, timeout=240
    )


@pytest.mark.slow
def test_what_is_published_is_what_was_exported(
    trained: Path, tmp_path: Path, hub: dict[str, str]
) -> None:
    folder = tmp_path / "exported"
    done = export(trained, str(folder), f"push_to_hub={NAME}", "private=true", env=hub)
    assert done.returncode == 0, done.stderr
    assert f"published as {NAME}: {hub['HF_ENDPOINT']}/{NAME}/commit/1" in done.stdout.replace(
        "\n", ""
    )
    (made,) = Hub.made
    assert (made["name"], made["organization"]) == ("my-model", "someone")
    assert made.get("private") or made.get("visibility") == "private", "as this client says it"
    sent = {path: content for path, content in Hub.files.items() if path != ".gitattributes"}
    assert sent == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= sent.keys()


@pytest.mark.slow
def test_what_the_hub_refuses_is_told_and_the_folder_stays(
    trained: Path, tmp_path: Path, hub: dict[str, str]
) -> None:
    Hub.refuses = True
    done = export(trained, str(tmp_path / "exported"), f"push_to_hub={NAME}", env=hub)
    assert done.returncode == 1
    assert "You have no right to write here" in done.stderr + done.stdout
    assert (tmp_path / "exported" / "model.safetensors").is_file()


@pytest.mark.slow
def test_nothing_meant_to_be_private_goes_where_it_is_public(
    trained: Path, tmp_path: Path, hub: dict[str, str]
) -> None:
    Hub.private = False
    done = export(
        trained, str(tmp_path / "exported"), f"push_to_hub={NAME}", "private=true", env=hub
    )
    assert done.returncode == 2
    assert "exists already, and is public" in done.stderr
    assert Hub.files == {}


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["push_to_hub=a/b/c"], ("push_to_hub=a/b/c", "OWNER/NAME")),
        (["private=true"], ("private", "push_to_hub=NAME")),
        (["push_to_hub=a/b", "private=yes"], ("private=yes", "true or false")),
        (["push_to_hub=a/b"], ("push_to_hub=a/b", "HF_HUB_OFFLINE", "without the hub")),
        (["push_to=a/b"], ("push_to", "push_to_hub")),
    ],
)
def test_what_cannot_be_published_is_refused_before_anything_is_written(
    words: list[str],
    facts: tuple[str, ...],
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert optrun("export", str(trained), str(tmp_path / "exported"), *words) == 2
    told = capsys.readouterr().err
    for fact in facts:
        assert fact in told
    assert not (tmp_path / "exported").exists()
