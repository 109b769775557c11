"""Names of the files of an archive: safe on every system, and each only once.

Names are made of what is the user's own, so that two tasks may ask for the same one. A filter of constant size knows
the names that were given out. It may take a new name for a known one, never a known one for a new one: a name that it
knows gets the task's index. A process that resumes without the filter gives each such name its index.
"""

import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from urllib.parse import urlsplit

import msgspec

from conveyor.errors import InvalidField
from conveyor.model import JobKind, Task
from conveyor.read.body_names import FOLDER, extension_of, id_name, index_name, safe_text, slug_of
from conveyor.read.task_labels import labels_of

MAX_TEMPLATE = 200

_FIELD = re.compile(r"\{([^{}]*)\}")
_LITERAL = re.compile(r"[A-Za-z0-9._/-]*")
_OWN = "data."
# No safe name has this character.
_MARK = "~"
# The names of tasks without an id begin like this, up to a million of them.
_LIKE_AN_INDEX = re.compile(r"bodies/0[0-9]{6}[._]")
_FIRST_UNPADDED = 1_000_000
_FILTER_BYTES = 4 * 1024 * 1024
_PROBES = 4
_LONGEST_PART = 200


class NameTemplate(msgspec.Struct, frozen=True):
    """A template such as `{tag}/{id}{ext}`. Every value is one part of a path at most."""

    text: str

    def render(self, task: Task, kind: JobKind) -> str:
        """The name for a task. Empty folders are left out; a name that would be empty is the index."""
        rendered = _FIELD.sub(lambda field: _value(field[1], task, kind), self.text)
        *folders, last = rendered.split("/")
        own = f"{task.index:07d}{last}" if last[:1] in ("", ".") else last
        parts = [safe_text(part, _LONGEST_PART) for part in (*folders, own)]
        return FOLDER + "/".join(part for part in parts if part)

    @property
    def is_unique(self) -> bool:
        """Whether every name has the index or the id that only one task has."""
        return bool({"index", "task_id"}.intersection(_FIELD.findall(self.text)))


def checked_names(text: str | None) -> str | None:
    """A template for names, validated. Raises InvalidField."""
    if text is None:
        return None
    if not 0 < len(text) <= MAX_TEMPLATE:
        raise InvalidField(f"`names` has between 1 and {MAX_TEMPLATE} characters.", field="names")
    for field in _FIELD.findall(text):
        if field not in _VALUES and not (field.startswith(_OWN) and len(field) > len(_OWN)):
            known = ", ".join(f"{{{name}}}" for name in _VALUES)
            raise InvalidField(
                f"`names` has an unknown field {{{field}}}. Use {known} or {{data.NAME}}.", field="names"
            )
    literal = _FIELD.sub("", text)
    if not _LITERAL.fullmatch(literal) or ".." in literal or text.startswith("/") or not _FIELD.search(text):
        raise InvalidField(
            "`names` must have a field, such as {id}, and besides fields only letters, digits, dots, dashes, "
            "underscores and slashes, no `..` and no slash at its start.",
            field="names",
        )
    return text


class NameRegister:
    """The names that an archive has. `is_new`: none has been given out by another process."""

    def __init__(self, is_new: bool = True) -> None:
        self._is_new = is_new
        self._bits: bytearray | None = None
        self._last: tuple[int, str] | None = None

    def take(self, name: str, index: int, is_unique: bool = False) -> str:
        """The name, or the name with the index if it may be taken. Names with the same letters are the same on some
        systems, whatever their case. A task that did not fit into a file asks again, for the next one."""
        if self._last is None or self._last[0] != index:
            self._last = index, self._free(name, index, is_unique)
        return self._last[1]

    def _free(self, name: str, index: int, is_unique: bool) -> str:
        if (self._is_new or is_unique) and not self._add(name.lower()):
            return name
        stem, dot, ending = name.rpartition(".")
        if not dot or "/" in ending:
            return f"{name}{_MARK}{index}"
        return f"{stem}{_MARK}{index}.{ending}"

    def _add(self, name: str) -> bool:
        """Whether the name may have been added before."""
        if self._bits is None:
            self._bits = bytearray(_FILTER_BYTES)
        bits, known = self._bits, True
        digest = blake2b(name.encode(), digest_size=4 * _PROBES).digest()
        for probe in range(_PROBES):
            place = int.from_bytes(digest[4 * probe : 4 * probe + 4], "little") % (8 * _FILTER_BYTES)
            if not bits[place >> 3] & (1 << (place & 7)):
                known = False
                bits[place >> 3] |= 1 << (place & 7)
        return known


class ArchiveNames:
    """Gives each body of an archive its name."""

    def __init__(self, kind: JobKind, template: str | None = None, register: NameRegister | None = None) -> None:
        self.register = NameRegister() if register is None else register
        self._kind = kind
        self._template = None if template is None else NameTemplate(template)

    def name(self, task: Task) -> str:
        """The name of the task's body. Call it once for each task."""
        if self._template is not None:
            return self.register.take(self._template.render(task, self._kind), task.index, self._template.is_unique)
        name = id_name(task)
        if name is not None:
            clashes = _LIKE_AN_INDEX.match(name)
            return self.register.take(f"{FOLDER}_{name.removeprefix(FOLDER)}" if clashes else name, task.index)
        name = index_name(task)
        if task.index < _FIRST_UNPADDED:
            return name
        # The id of another task may be this number.
        return self.register.take(name, task.index, is_unique=bytes(task.input)[:1] == b'"')


class EarlierNames(ArchiveNames):
    """The names that the version before gave, for a file that it began."""

    def name(self, task: Task) -> str:
        """The name of the task's body."""
        return index_name(task)


def _value(field: str, task: Task, kind: JobKind) -> str:
    if not field.startswith(_OWN):
        return _VALUES[field](task, kind)
    value = labels_of(task.input, kind).data.get(field.removeprefix(_OWN))
    if value is None or isinstance(value, dict | list):
        return ""
    return safe_text(value if isinstance(value, str) else str(value))


def _host(task: Task, kind: JobKind) -> str:
    try:
        return safe_text(urlsplit(labels_of(task.input, kind).url or "").hostname or "")
    except ValueError:
        return ""


_VALUES: Mapping[str, Callable[[Task, JobKind], str]] = {
    "index": lambda task, _: f"{task.index:07d}",
    "id": lambda task, kind: safe_text(labels_of(task.input, kind).id or ""),
    "tag": lambda task, kind: safe_text(labels_of(task.input, kind).tag or ""),
    "host": _host,
    "slug": lambda task, _: slug_of(task),
    "task_id": lambda task, _: task.task_id,
    "ext": lambda task, _: extension_of(task),
}
