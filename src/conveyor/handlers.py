"""Handlers: the user's own functions. `@conveyor.task("name")` registers one; `load_app` imports the user's module, and
the python executor finds the function by the name in the job."""

import codecs
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from conveyor.errors import BadInput

F = TypeVar("F", bound=Callable[..., Any])

MAX_NAME = 200
MAX_NOTE = 200
MAX_DESCRIBED = 500
_MAX_NUMBER = 2**63 - 1
# Encodings of text that no page has: of host names and of Python's source, some of them slow or unsafe to decode.
_NOT_OF_PAGES = frozenset({"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape"})
# Byte order marks; a longer one comes before the shorter one that it begins with.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# In a Content-Type header, and in the first bytes of an HTML page or an XML document.
_CHARSET = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?([A-Za-z0-9._:-]{1,40})""", re.IGNORECASE)
_HEAD_BYTES = 1024


class AppUnloadable(BadInput):
    """The module with the handlers cannot be loaded. Check CONVEYOR_APP, and that the module imports."""

    code = "app_unloadable"


class InvalidHandler(BadInput):
    """The function cannot be registered as a handler. Give it a unique name."""

    code = "invalid_handler"


class Cancelled(Exception):
    """The call was cancelled: the job was cancelled or paused, or another attempt runs the task."""


class Context:
    """Information about a call, and ways to report from it. A function with a parameter named `context` gets one."""

    def __init__(
        self,
        job_id: str,
        run_id: str,
        index: int,
        attempt: int,
        report: Callable[[int, int | None, str | None], None],
    ) -> None:
        self.job_id = job_id
        self.run_id = run_id
        self.index = index
        self.attempt = attempt
        # Set by the worker while the call runs.
        self.cancelled = False
        self._report = report
        self._last: tuple[int, int | None, str | None] = (0, None, None)

    def progress(self, done: int, total: int | None = None, note: str | None = None) -> None:
        """Report progress, in units of your own. From then on, the call counts as stuck if it reports nothing for
        CONVEYOR_STUCK_AFTER seconds."""
        text = None if note is None else storable_text(str(note), MAX_NOTE)
        self._last = (_bounded(done), None if total is None else _bounded(total), text)
        self._report(*self._last)

    def heartbeat(self) -> None:
        """Report the last progress again, to show that the call is alive."""
        self._report(*self._last)

    def check(self) -> None:
        """Raise Cancelled if the call was cancelled."""
        if self.cancelled:
            raise Cancelled("the call was cancelled")


class FetchedPage:
    """A body and the response that it came with: what the function of a job's `extract` gets. `conveyor.Page` is this
    class."""

    def __init__(
        self,
        body: bytes,
        *,
        url: str,
        input: Any = None,
        status: int | None = None,
        final_url: str | None = None,
        content_type: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.body = body
        # The URL that was requested, and the one that answered after redirects.
        self.url = url
        self.final_url = final_url or url
        # The task as it was submitted: a URL, or an object with it.
        self.input = url if input is None else input
        self.status = status
        self.content_type = content_type
        self._headers = headers

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers of the response by their names in lower case; repeated ones are joined."""
        joined: dict[str, str] = {}
        for name, value in self._headers:
            key = name.lower()
            joined[key] = f"{joined[key]}, {value}" if key in joined else value
        return joined

    @property
    def id(self) -> str | None:
        """The `id` of the task, if it has one."""
        return self._of_input("id")

    @property
    def tag(self) -> str | None:
        """The `tag` of the task, if it has one."""
        return self._of_input("tag")

    @cached_property
    def encoding(self) -> str:
        """The character encoding: by a byte order mark, the response's header, or the page itself; else utf-8."""
        for mark, name in _MARKS:
            if self.body.startswith(mark):
                return name
        named = _CHARSET.search((self.content_type or "").encode(errors="ignore")) or _CHARSET.search(
            self.body[:_HEAD_BYTES]
        )
        return "utf-8" if named is None else _known_encoding(named[1].decode("ascii", "ignore"))

    @cached_property
    def text(self) -> str:
        """The body as text. Bytes that are not valid become U+FFFD."""
        return self.body.decode(self.encoding, "replace")

    def json(self) -> Any:
        """The body as JSON. Raises ValueError."""
        return json.loads(self.body)

    @cached_property
    def html(self) -> Any:
        """The parsed page, a selectolax.lexbor.LexborHTMLParser: `page.html.css_first("h1").text()`."""
        try:
            lexbor = importlib.import_module("selectolax.lexbor")
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                "page.html needs selectolax. Install conveyor-jobs[html] where the workers run."
            ) from None
        return lexbor.LexborHTMLParser(self.text)

    def _of_input(self, name: str) -> str | None:
        return self.input.get(name) if isinstance(self.input, dict) else None


class Handler(NamedTuple):
    """A registered function. It takes the input of a task, and optionally a context."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    wants_context: bool = False


class Handlers:
    """Registered functions, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Handler] = {}

    def task(self, name: str) -> Callable[[F], F]:
        """Register the decorated function, sync or async, as the handler `name`. It gets the input of a task, and its
        return value is stored as JSON."""
        if callable(name) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidHandler(f'invalid handler name. Use 1 to {MAX_NAME} printable characters: @task("name")')

        def register(function: F) -> F:
            known = self._by_name.get(name)
            if known is not None and _identity(known.function) != _identity(function):
                raise InvalidHandler(f"two functions have the handler name {name!r}. Rename one of them")
            self._by_name[name] = Handler(name, function, _is_async(function), _wants_context(function))
            return function

        return register

    def find(self, name: str | None) -> Handler | None:
        return None if name is None else self._by_name.get(name)

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def modules(self) -> list[str]:
        """The modules of the functions, so that another process can import them."""
        return sorted({handler.function.__module__ for handler in self._by_name.values()})


def _known_encoding(name: str) -> str:
    """The codec of this name, which a page chose, if it is one for text; else utf-8."""
    try:
        codec = codecs.lookup(name)
        # Other codecs of Python turn bytes into bytes, and refuse to decode a str.
        b"a".decode(name, "replace")
    except (LookupError, ValueError):
        return "utf-8"
    return "utf-8" if codec.name.replace("-", "_") in _NOT_OF_PAGES else codec.name


# `from conveyor import task` registers here. A module may also create its own Handlers.
default = Handlers()
task = default.task


def load_app(spec: str) -> Handlers:
    """Import "module", whose functions `conveyor.task` registers, or "module:name", where name is a Handlers. The
    current directory comes first on the path, as with `python -m`. Raises AppUnloadable."""
    module_name, _, attribute = spec.partition(":")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise AppUnloadable(
                f"module {module_name!r} not found. Run the command in its directory, or set PYTHONPATH"
            ) from None
        raise AppUnloadable(f"importing {module_name!r} failed: {describe_error(error)}") from error
    except Exception as error:
        raise AppUnloadable(f"importing {module_name!r} failed: {describe_error(error)}") from error
    if not attribute:
        return default
    handlers = getattr(module, attribute, None)
    if not isinstance(handlers, Handlers):
        raise AppUnloadable(f"{attribute!r} of {module_name!r} is not a conveyor.Handlers. Name only the module")
    return handlers


def storable_text(text: str, max_length: int) -> str:
    """The user's text in a form that can be stored and sent: truncated, with lone surrogates escaped. It calls the
    methods of str itself, because the text may be of a subclass that overrides them."""
    cut = str.__getitem__(text, slice(max_length))
    return str.encode(cut, "utf-8", "backslashreplace").decode()[:max_length]


def describe_error(error: BaseException) -> str:
    """The type and text of an exception, even if the user's code for them raises."""
    try:
        kind = storable_text(type(error).__name__, MAX_DESCRIBED)
    except BaseException:
        kind = "Exception"
    try:
        return f"{kind}: {storable_text(str(error), MAX_DESCRIBED)}"
    except BaseException:
        return f"{kind}: (no readable text)"


def _bounded(number: int) -> int:
    """The number, limited to what stores and messages can represent."""
    return max(-_MAX_NUMBER, min(int(number), _MAX_NUMBER))


def _identity(function: Callable[..., Any]) -> tuple[str, str] | int:
    """Equal for a function and its copy after the module was imported again."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return (module, name) if module and name else id(function)


def _wants_context(function: Callable[..., Any]) -> bool:
    try:
        return "context" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
