"""Read a page as a browser would."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """What a browser would load, and whether tags are balanced."""

    VOID = ("meta", "br", "img", "input", "hr", "link", "path", "use")

    def __init__(self, content: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        for name, value in attrs:
            if name in (
                "src",
                "href",
                "xlink:href",
                "srcset",
                "data",
                "action",
                "poster",
                "background",
                "style",
            ):
                self.loads.append(f"{name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open[-1] in self.VOID and self.open[-1] != tag:
            self.open.pop()
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
