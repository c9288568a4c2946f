"""The hub that answers, the one that does not, and the names that never go there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from optrun.data import hub_access as hub
from tests.running import optrun_process


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub._silence.cache_clear()
    yield
    hub._silence.cache_clear()


def test_a_hub_that_answers_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(503)  # an answer, whatever it says

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        found = [hub.missing("someone/something"), hub.missing("bert-base")]
        server.shutdown()
        thread.join()
    assert found == [None, None]
    assert len(asked) == 1
    assert not constants.HF_HUB_OFFLINE
    assert hub.nowhere(None) == "no such local folder, and not to be had from the hub"


def test_a_silent_hub_leaves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.missing(str(tmp_path)) is None
    assert hub.missing("./nothing/here") is None
    assert not constants.HF_HUB_OFFLINE
    said = hub.missing("someone/something")
    assert said is not None
    assert said.startswith("http://127.0.0.1:9 does not answer (ConnectError")
    assert constants.HF_HUB_OFFLINE
    assert hub.from_cache(["someone/something", None, str(tmp_path), "someone/something"]) == [
        f"someone/something comes from the cache, as it was when it was fetched: {said}."
    ]


def test_the_users_word_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.missing("someone/something") == "HF_HUB_OFFLINE is set"


class _Refusing(BaseHTTPRequestHandler):
    """A hub that refuses everything below it, and warns."""

    def do_HEAD(self) -> None:
        gated = "gated" in self.path
        self.send_response(200 if self.path == "/" else 403 if gated else 401)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "Visit us, log in, and read this long sentence.")
        self.send_header("X-HF-Warning", "login; You are sending unauthenticated requests.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (
            ["model=pretrained", "model.path=some/gated"],
            ["model.path=some/gated", "gate", "huggingface.co/some/"],
        ),
        (
            ["model=pretrained", "model.path=some/thing"],
            ["model.path=some/thing", "nothing of this name", "hf auth login"],
        ),
        (["model=bert_tiny", "model.tokenizer=some/gated"], ["model.tokenizer=some/gated", "gate", "HF_TOKEN"]),
        (["model=bert_tiny", "model.tokenizer=some/thing"], ["model.tokenizer=some/thing", "nothing of this name"]),
        (["model=bert_tiny", "data=hub", "data.path=some/gated"], ["data.path=some/gated", "gate"]),
        (["model=bert_tiny", "data=hub", "data.path=some/thing"], ["data.path=some/thing", "nothing of this name"]),
    ],
    ids=lambda case: case[-1] if case[0].startswith("model=") else "",
)
def test_a_name_that_the_hub_does_not_give(words: list[str], facts: list[str], tmp_path: Path) -> None:
    """In a process of its own, since the libraries read the endpoint once: our sentence, and nothing around it."""
    data = [] if "data=hub" in words else ["data=files", "data.train=not-read.csv"]
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        done = optrun_process("task=sequence_classification", *words, *data, cwd=tmp_path, env=env)
        server.shutdown()
        thread.join()
    assert done.returncode == 2
    message, hint = done.stderr.splitlines()
    for fact in facts:
        assert fact in message
    assert len(message) < 250
    assert hint == "optrun --help lists every choice and value"
    assert len(done.stdout.splitlines()) == 1
