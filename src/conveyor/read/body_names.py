"""Names of bodies in an archive. Gets a task, returns a name that is safe on every system, made of the index, the
harmless characters of the URL, and an extension from a fixed table.
"""

import re
from functools import lru_cache

import msgspec

from conveyor.model import Task

_SLUG_CHARS = 40
_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//(?:[^/?#]*@)?([^/?#]*)([^?#]*)")
_NOT_SLUG = re.compile(r"(?:[^A-Za-z0-9.]|\.{2,})+")


class _WithUrl(msgspec.Struct):
    url: str = ""


_text = msgspec.json.Decoder(str).decode
_object = msgspec.json.Decoder(_WithUrl).decode

_EXTENSIONS = {
    "application/gzip": ".gz",
    "application/javascript": ".js",
    "application/json": ".json",
    "application/ld+json": ".json",
    "application/msword": ".doc",
    "application/pdf": ".pdf",
    "application/vnd.ms-excel": ".xls",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": ".xlsx",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ".docx",
    "application/x-ndjson": ".jsonl",
    "application/xhtml+xml": ".html",
    "application/xml": ".xml",
    "application/zip": ".zip",
    "audio/mpeg": ".mp3",
    "font/woff2": ".woff2",
    "image/avif": ".avif",
    "image/gif": ".gif",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/svg+xml": ".svg",
    "image/webp": ".webp",
    "image/x-icon": ".ico",
    "text/css": ".css",
    "text/csv": ".csv",
    "text/html": ".html",
    "text/javascript": ".js",
    "text/markdown": ".md",
    "text/plain": ".txt",
    "text/xml": ".xml",
    "video/mp4": ".mp4",
}


def body_name(task: Task) -> str:
    """The name of a task's body in the archive. From the URL it takes only letters, digits, dots and dashes of the host
    and the path, never credentials or the query."""
    raw = bytes(task.input)
    slug = _slug(_url_of(raw)) if raw[:1] in {b'"', b"{"} else ""
    content_type = task.detail.content_type or ""
    extension = _EXTENSIONS.get(content_type) or _extension(content_type)
    if not slug:
        return f"bodies/{task.index:07d}{extension}"
    if slug.lower().endswith(extension):
        slug = slug[: -len(extension)].strip("-.")
    return f"bodies/{task.index:07d}{'_' if slug else ''}{slug}{extension}"


def _url_of(task_input: bytes) -> str:
    try:
        return _text(task_input) if task_input[:1] == b'"' else _object(task_input).url
    except msgspec.MsgspecError:
        return ""


def _slug(url: str) -> str:
    match = _URL.match(url)
    if match is None:
        return ""
    text = _NOT_SLUG.sub("-", match[1] + match[2][: 4 * _SLUG_CHARS])
    return text.strip("-.")[:_SLUG_CHARS].strip("-.")


@lru_cache(256)
def _extension(content_type: str) -> str:
    kind = content_type.partition(";")[0].strip().lower()
    if kind in _EXTENSIONS:
        return _EXTENSIONS[kind]
    if kind.endswith("+json"):
        return ".json"
    return ".xml" if kind.endswith("+xml") else ".bin"
