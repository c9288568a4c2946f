"""The hub that answers, the one that does not, and the names that never go there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from optrun.data import hub_access as hub
from tests import compose_cache


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.why_hub_is_silent.cache_clear()
    yield
    hub.why_hub_is_silent.cache_clear()


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
        found = [hub.why_cache_only("someone/something"), hub.why_cache_only("bert-base")]
        server.shutdown()
        thread.join()
    assert found == [None, None]
    assert len(asked) == 1
    assert not constants.HF_HUB_OFFLINE
    assert hub.describe_missing(None) == "no such local folder, and the hub did not send it"


def test_a_silent_hub_leaves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.why_cache_only(str(tmp_path)) is None
    assert hub.why_cache_only("./nothing/here") is None
    assert not constants.HF_HUB_OFFLINE
    said = hub.why_cache_only("someone/something")
    assert said is not None
    assert said.startswith("http://127.0.0.1:9 does not answer (ConnectError")
    assert constants.HF_HUB_OFFLINE
    assert hub.cache_warnings(["someone/something", None, str(tmp_path), "someone/something"]) == [
        f"someone/something comes from the cache, as it was when it was fetched: {said}."
    ]


def test_the_users_word_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.why_cache_only("someone/something") == "HF_HUB_OFFLINE is set"


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


CASES = [
    (
        ["model=pretrained", "model.path=some/gated"],
        ["model.path=some/gated", "gate", "huggingface.co/some/"],
    ),
    (
        ["model=pretrained", "model.path=some/thing"],
        ["model.path=some/thing", "nothing of this name", "hf auth login"],
    ),
    (
        ["model=bert_tiny", "model.tokenizer=some/gated"],
        ["model.tokenizer=some/gated", "gate", "HF_TOKEN"],
    ),
    (
        ["model=bert_tiny", "model.tokenizer=some/thing"],
        ["model.tokenizer=some/thing", "nothing of this name"],
    ),
    (["model=bert_tiny", "data=hub", "data.path=some/gated"], ["data.path=some/gated", "gate"]),
    (
        ["model=bert_tiny", "data=hub", "data.path=some/thing"],
        ["data.path=some/thing", "nothing of this name"],
    ),
]
EACH_FORKED = """
import gc, json, os, pathlib, sys
from optrun.cli import main as cli
from optrun.config import overrides, store
import datasets, transformers.models.auto.modeling_auto, optrun.runner.train
from tests import compose_cache
compose_cache.install(pathlib.Path(sys.argv[2]))
hydra = store.open_hydra()
words = ["task=sequence_classification", "model=bert_tiny", "data=hub", "data.path=x"]
checked = overrides.parse_checked(hydra, "config", words, sweep=False)
store.typed(store.without_hydra(store.compose(hydra, "config", checked)))
gc.freeze()
for number, words in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for name, descriptor in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        code = cli.run(words)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without taking apart all that is imported
    with open(f"{number}.code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each case said, in a process of its own, since the libraries read the endpoint once."""
    folder = tmp_path_factory.mktemp("refused")
    data = [
        [] if "data=hub" in words else ["data=files", "data.train=not-read.csv"]
        for words, _ in CASES
    ]
    lines = [
        ["task=sequence_classification", *case[0], *more]
        for case, more in zip(CASES, data, strict=True)
    ]
    with HTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        env = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder),
        }
        env["PYTHONPATH"] = os.pathsep.join(
            [str(compose_cache.CHECKOUT), os.environ.get("PYTHONPATH", "")]
        )
        code = ["-W", "ignore::DeprecationWarning", "-c", EACH_FORKED]
        command = [sys.executable, *code, json.dumps(lines), str(compose_cache.folder)]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        server.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=[words[-1] for words, _ in CASES])
def test_a_name_that_the_hub_does_not_give(number: int, refused: Path) -> None:
    """Our sentence, and nothing around it."""
    said = {name: (refused / f"{number}.{name}").read_text() for name in ("code", "out", "err")}
    assert said["code"] == "2"
    (message,) = said["err"].splitlines()
    for fact in CASES[number][1]:
        assert fact in message
    assert len(message) < 250
    assert len(said["out"].splitlines()) == 1
