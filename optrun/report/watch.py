"""Follow a sweep.

The page of its report, made anew while jobs run, for a browser on this machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console

from optrun.artifacts.run_dir import METRICS, SUMMARY, SWEEP, find_runs
from optrun.base.errors import ConfigError
from optrun.base.reading import read_text
from optrun.report.build import REFRESH, Report, report

_WAITING = (
    "<!doctype html><meta http-equiv=refresh content=5><title>optrun report</title><p>No run has"
    " begun yet."
)


class _Page(BaseHTTPRequestHandler):
    """Answers one address with one file.

    Whoever asks by another name than this machine's gets nothing.
    """

    def __init__(self, file: Callable[[], Path | None], *args: object) -> None:
        self._file = file
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Send the page as it stands."""
        if (
            self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost")
            or self.path != "/"
        ):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        file = self._file()
        content = _WAITING.encode() if file is None else read_text(file).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Keep the terminal for the sweep."""


@contextmanager
def served(file: Callable[[], Path | None], port: int = 0) -> Iterator[str]:
    """Serve a page on localhost until the block ends.

    Args:
        file: Where it lies; None: it is not made yet.
        port: 0: a free one.

    Yields:
        Its address.

    Raises:
        ConfigError: The port is taken.
    """
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Page, file))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"optrun report port={port}: {error}. Without port= a free one is taken."
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def watch(
    dirs: Sequence[Path],
    console: Console,
    *,
    port: int = 0,
    pause: Callable[[float], object] = time.sleep,
    make: Callable[..., Report] = report,
) -> Report | None:
    """Make the page of a report anew whenever a run has written something, until every job has ended or Ctrl-C.

    Args:
        dirs: Runs, sweeps, or folders of them.
        console: Where the address and the last report go.
        port: Of the page; 0: a free one.
        pause: Waits for so many seconds.
        make: Makes the report; takes `follows`.

    Returns:
        The last report; None where no run had begun.
    """
    made: Report | None = None
    seen: object = None
    with served(lambda: None if made is None else made.files[0], port) as address:
        console.print(
            f"{address} follows {', '.join(map(str, dirs))}; Ctrl-C ends it",
            markup=False,
            soft_wrap=True,
        )
        try:
            while True:
                now = _fingerprint(dirs)
                if now != seen and now:
                    made, seen = make(dirs, follows=True), now
                if made is not None and not made.comparison.left and _fingerprint(dirs) == seen:
                    break
                pause(REFRESH)
        except KeyboardInterrupt:
            console.print("no longer followed; the jobs go on", markup=False)
    return None if made is None else make(dirs, console=console, follows=bool(made.comparison.left))


def _fingerprint(dirs: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """Name what the report reads by size and time; empty where no run has begun."""
    found = []
    for directory in dirs:
        runs = find_runs(directory)
        for file in [each / name for each in runs for name in (METRICS, SUMMARY)] + [
            directory / SWEEP
        ] * bool(runs):
            with suppress(OSError):
                stat = file.stat()
                found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return tuple(found)
