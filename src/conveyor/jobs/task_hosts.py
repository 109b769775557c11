"""The host that a task is about: that of the URL in its input."""

import re
from collections.abc import Iterable
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


def task_hosts(inputs: Iterable[str]) -> list[str]:
    """The host of each input, empty if it has none. Neighbours often have the same, and then it is not looked for."""
    hosts: list[str] = []
    host, begin = "", "\0"
    for task_input in inputs:
        if not task_input.startswith(begin):
            plain = _PLAIN.match(task_input)
            if plain is not None:
                # With the character after the host, so that a longer host does not begin with it.
                host, begin = plain[1], task_input[: plain.end() + 1]
            else:
                host, begin = task_host(task_input) or "", "\0"
        hosts.append(host)
    return hosts
