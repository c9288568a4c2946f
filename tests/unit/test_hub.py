"""The hub that answers, the one that does not, and the names that never go there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from optrun import hub


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
