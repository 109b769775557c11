"""The host that a task is about: that of the URL in its input."""

import re
from urllib.parse import urlsplit

import msgspec

# A JSON string with a plain URL: most inputs are one.
_PLAIN = re.compile(r'"https?://([a-z0-9._-]+)(?=[:/?#"])')


class _UrlInput(msgspec.Struct):
    """An input that is an object."""

    url: str = ""


_object = msgspec.json.Decoder(_UrlInput)
_string = msgspec.json.Decoder(str)


def task_host(task_input: str) -> str | None:
    """The host in the JSON of an input, in lower case; None if it has none."""
    plain = _PLAIN.match(task_input)
    if plain is not None:
        return plain[1]
    try:
        url = _object.decode(task_input).url if task_input.startswith("{") else _string.decode(task_input)
        return urlsplit(url).hostname or None
    except (msgspec.MsgspecError, ValueError):
        return None
