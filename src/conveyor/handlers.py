"""The user's own functions. `@conveyor.task("name")` registers one; `load_app` imports the module that does so, and
hands on the handlers for the python executor to find by the name that a job gives."""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from conveyor.errors import BadInput

F = TypeVar("F", bound=Callable[..., Any])

MAX_NAME = 200
MAX_NOTE = 200
MAX_DESCRIBED = 500
_MAX_WHOLE = 2**63 - 1


class AppUnloadable(BadInput):
    """The module with the task functions can not be loaded."""

    code = "app_unloadable"


class InvalidHandler(BadInput):
    """The function can not be registered as a task."""

    code = "invalid_handler"


class Cancelled(Exception):
    """The call is not wanted any more: its job was cancelled or paused, or another attempt has the task."""


class Context:
    """What a handler may know and say of its call. A function with a parameter named `context` is given one."""

    def __init__(
        self,
        job_id: str,
        run_id: str,
        index: int,
        attempt: int,
        say: Callable[[int, int | None, str | None], None],
    ) -> None:
        self.job_id = job_id
        self.run_id = run_id
        self.index = index
        self.attempt = attempt
        # Set from outside, while the call goes on.
        self.cancelled = False
        self._say = say
        self._last: tuple[int, int | None, str | None] = (0, None, None)

    def progress(self, done: int, total: int | None = None, note: str | None = None) -> None:
        """Say how far the call is, in units of its own. From then on it counts as stuck if it says nothing more for
        CONVEYOR_STUCK_AFTER seconds."""
        said = None if note is None else plain_text(str(note), MAX_NOTE)
        self._last = (_whole(done), None if total is None else _whole(total), said)
        self._say(*self._last)

    def heartbeat(self) -> None:
        """Say that the call is alive, and as far as it was."""
        self._say(*self._last)

    def check(self) -> None:
        """Raise Cancelled if the call is not wanted any more."""
        if self.cancelled:
            raise Cancelled("the call was cancelled")


class Handler(NamedTuple):
    """A registered function of one argument, the input of a task, and of a context if it asks for one."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    wants_context: bool = False


class Handlers:
    """Functions by the names that jobs know them by."""

    def __init__(self) -> None:
        self._by_name: dict[str, Handler] = {}

    def task(self, name: str) -> Callable[[F], F]:
        """Register the decorated function, sync or async, as the handler `name`. It is given the input of a task, and
        what it returns is kept as JSON."""
        if callable(name) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidHandler(f'a task needs a name of 1 to {MAX_NAME} characters: @task("name")')

        def register(function: F) -> F:
            known = self._by_name.get(name)
            if known is not None and _identity(known.function) != _identity(function):
                raise InvalidHandler(f"two functions are registered as the task {name!r}")
            self._by_name[name] = Handler(name, function, _is_async(function), _wants_context(function))
            return function

        return register

    def find(self, name: str | None) -> Handler | None:
        return None if name is None else self._by_name.get(name)

    def names(self) -> list[str]:
        return sorted(self._by_name)

    def modules(self) -> list[str]:
        """Where the functions are, so that another process can have them too."""
        return sorted({handler.function.__module__ for handler in self._by_name.values()})


# What `from conveyor import task` registers with. A module that wants its own makes a Handlers.
default = Handlers()
task = default.task


def load_app(spec: str) -> Handlers:
    """Import "module", whose functions are registered by `conveyor.task`, or "module:name", where name is a Handlers.
    The current directory is searched first, as `python -m` would. Raises AppUnloadable."""
    module_name, _, attribute = spec.partition(":")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise AppUnloadable(f"there is no module {module_name!r}; looked in {directory} first") from None
        raise AppUnloadable(f"importing {module_name!r} failed: {described(error)}") from error
    except Exception as error:
        raise AppUnloadable(f"importing {module_name!r} failed: {described(error)}") from error
    if not attribute:
        return default
    found = getattr(module, attribute, None)
    if not isinstance(found, Handlers):
        raise AppUnloadable(f"{attribute!r} of {module_name!r} is not a conveyor.Handlers")
    return found


def plain_text(text: str, longest: int) -> str:
    """Text of the user's as it can be stored and sent: cut, and with what UTF-8 does not have (lone surrogates) written
    as escapes. Not by methods of the text, which may be of a class of its own."""
    cut = str.__getitem__(text, slice(longest))
    return str.encode(cut, "utf-8", "backslashreplace").decode()[:longest]


def described(error: BaseException) -> str:
    """The type of an exception and its text, whatever the user's code that makes these does."""
    try:
        kind = plain_text(type(error).__name__, MAX_DESCRIBED)
    except BaseException:
        kind = "Exception"
    try:
        return f"{kind}: {plain_text(str(error), MAX_DESCRIBED)}"
    except BaseException:
        return f"{kind}: (its text can not be read)"


def _whole(number: int) -> int:
    """A number that the store and every message have room for."""
    return max(-_MAX_WHOLE, min(int(number), _MAX_WHOLE))


def _identity(function: Callable[..., Any]) -> tuple[str, str] | int:
    """Equal for a function and the same one after its module was imported again."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return (module, name) if module and name else id(function)


def _wants_context(function: Callable[..., Any]) -> bool:
    try:
        return "context" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
