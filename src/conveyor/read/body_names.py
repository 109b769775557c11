"""Names of bodies in an archive. Gets a task, returns a name that is safe on every system, made of the harmless
characters of the user's id, or of the index and the URL, and an extension from a fixed table.
"""

import re
from functools import lru_cache

import msgspec

from conveyor.model import Task
from conveyor.read.task_labels import id_of

FOLDER = "bodies/"

_SLUG_CHARS = 40
_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//(?:[^/?#]*@)?([^/?#]*)([^?#]*)")
_ID_CHARS = 100
_NOT_ID = re.compile(r"(?:[^A-Za-z0-9._-]|\.{2,})+")
# Names that Windows keeps for devices, whatever follows a dot.
_DEVICES = re.compile(r"(?i)(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|$)")
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
    """The name of a task's body: its id or, without one, its index and URL. Ids that look alike give the same name."""
    return id_name(task) or index_name(task)


def id_name(task: Task) -> str | None:
    """The name by the user's id; None if it has none, or nothing of it can be a name."""
    label = id_of(task.input)
    own = safe_text(label) if label else ""
    if not own:
        return None
    extension = extension_of(task)
    return f"{FOLDER}{own}{'' if own.lower().endswith(extension) else extension}"


def index_name(task: Task) -> str:
    """The name by the index, which no other task has. From the URL it takes only letters, digits, dots and dashes of
    the host and the path, never credentials or the query."""
    extension, slug = extension_of(task), slug_of(task)
    if not slug:
        return f"{FOLDER}{task.index:07d}{extension}"
    if slug.lower().endswith(extension):
        slug = slug[: -len(extension)].strip("-.")
    return f"{FOLDER}{task.index:07d}{'_' if slug else ''}{slug}{extension}"


def extension_of(task: Task) -> str:
    """The extension for the content type of the body."""
    content_type = task.detail.content_type or ""
    return _EXTENSIONS.get(content_type) or _extension(content_type)


def slug_of(task: Task) -> str:
    """What the URL has of harmless characters."""
    raw = bytes(task.input)
    return _slug(_url_of(raw)) if raw[:1] in {b'"', b"{"} else ""


def safe_text(text: str, limit: int = _ID_CHARS) -> str:
    """A text of the user's as a part of a file name; empty if nothing of it can be one."""
    safe = _NOT_ID.sub("-", text[: 4 * limit]).strip("-.")[:limit].strip("-.")
    return f"_{safe}" if _DEVICES.match(safe) else safe


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
