"""Usual lines: plain URLs, as nearly all lines of a list are. One match checks a stretch of them, where a match for
each line would take five times as long."""

import re

from conveyor.lists.inputs import OF_URLS, USUAL_URL
from conveyor.model import InputJson, JobKind, ListFormat

_PATTERNS = {
    ListFormat.TEXT: re.compile(b"(?:" + USUAL_URL + b"\n)*+"),
    ListFormat.JSONL: re.compile(b'(?:"' + USUAL_URL + b'"\n)*+'),
}


class UsualLines:
    """Takes stretches of usual lines from a text, in which every line ends with a newline."""

    def __init__(self, kind: JobKind, form: ListFormat) -> None:
        self._pattern = _PATTERNS.get(form) if kind in OF_URLS else None
        # A line of text becomes a JSON string.
        self._quote = '"' if form is ListFormat.TEXT else ""

    def take(self, text: bytes, start: int) -> tuple[list[InputJson], int]:
        """The inputs of all usual lines from here on, none or more, and where the first other line begins."""
        match = None if self._pattern is None else self._pattern.match(text, start)
        if match is None or match.end() == start:
            return [], start
        quote = self._quote
        lines = text[start : match.end() - 1].decode().replace("\n", f"{quote}\n{quote}")
        return f"{quote}{lines}{quote}".split("\n"), match.end()  # type: ignore[return-value]  # InputJson is a str
