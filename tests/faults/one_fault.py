"""One fault in one call: a wrapper over the seams of a system that writes down every call and fails one of them, once.

A call is named by its seam, its method, the function that makes it, and how many of that kind came before. It fails
before it takes effect, or after, as when an answer is lost on its way.
"""

import inspect
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import conveyor
from conveyor.engines.records import Records
from conveyor.errors import EngineFailed
from conveyor.system import System
from conveyor.telemetry.seams import PROTOCOLS, is_stream

# Calls that change nothing: whether one of them fails before or after is the same to everybody.
READS = {
    "jobs": "runs job jobs active_jobs run unswept_jobs purgeable_jobs",
    "ingests": "ranges range ingested",
    "access": "upload expired_uploads key keys",
    "documents": "document documents due_documents",
    "outbox": "events undispatched",
    "tasks": "unfinished counts error_codes task at page scan events walk",
    "queue": "dead_letters find_dead_letters depth waiting_since next_queue",
    "coordinator": "permits_in_use permits_in_use_of cached",
    "blobs": "get size listing stream presigned_put presigned_get part_bytes presigned_part stored_parts",
}
# Modules whose functions call a seam for somebody else, who is the caller.
_HELPERS = ("telemetry/seams.py", "jobs/chunks.py")
_HOME = str(Path(conveyor.__file__).parent) + "/"


_END = object()
# As the caller: whoever it is.
ANYBODY = "anybody"


class When(StrEnum):
    """Whether the call takes effect before it fails."""

    BEFORE = "before"
    AFTER = "after"


class Kind(tuple[str, str, str]):
    """Calls that look alike: seam, method and caller."""

    __slots__ = ()

    def __str__(self) -> str:
        seam, method, caller = self
        return f"{seam}.{method} by {caller}"

    @property
    def is_read(self) -> bool:
        return self[1] in READS.get(self[0], "").split()


@dataclass(frozen=True)
class Fault:
    """The call that fails."""

    kind: Kind
    # From 0, among the calls of its kind.
    ordinal: int
    when: When

    def __str__(self) -> str:
        return f"{self.when} {self.kind} #{self.ordinal}"


class Injector:
    """Sees every call of the seams that it was put over. It has one fault to make, or none."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault = fault
        self.calls: Counter[Kind] = Counter()
        self._by_method: Counter[Kind] = Counter()
        self.made = False
        # Calls that are under way.
        self.busy = 0

    def over(self, system: System) -> System:
        """The same system, with every seam behind this."""
        parts = {part.name: self._wrapped(part.name, getattr(system.records, part.name)) for part in fields(Records)}
        engines = {name: getattr(system, name) for name in PROTOCOLS if name not in parts}
        seams = {name: self._wrapped(name, engine) for name, engine in engines.items() if engine is not None}
        return replace(system, records=Records(**cast(Any, parts)), **seams)

    def faults(self) -> Iterator[Fault]:
        """Every fault that could be made in what was seen."""
        for kind, count in self.calls.items():
            for ordinal in range(count):
                yield from _faults_at(kind, ordinal)

    def some_faults(self) -> Iterator[Fault]:
        """Those at the first and the last call of each kind."""
        for kind, count in self.calls.items():
            for ordinal in sorted({0, count - 1}):
                yield from _faults_at(kind, ordinal)

    def _wrapped(self, seam: str, engine: object) -> object:
        wrapper = _Wrapper(engine)
        for protocol in PROTOCOLS[seam]:
            for method, of_protocol in inspect.getmembers(protocol, inspect.isfunction):
                call = None if method.startswith("_") else getattr(engine, method, None)
                if call is None:
                    continue
                if inspect.iscoroutinefunction(of_protocol):
                    call = self._call(seam, method, call)
                elif is_stream(of_protocol):
                    call = self._stream(seam, method, call)
                # Found by isinstance with a Protocol too, which does not ask __getattr__.
                setattr(wrapper, method, call)
        return wrapper

    def counted(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """The call, which makes this busy while it is under way."""

        async def made(*args: Any, **kwargs: Any) -> Any:
            self.busy += 1
            try:
                return await call(*args, **kwargs)
            finally:
                self.busy -= 1

        return made

    def _call(self, seam: str, method: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        counted = self.counted(call)

        async def made(*args: Any, **kwargs: Any) -> Any:
            when = self._seen(Kind((seam, method, _caller())))
            if when is When.BEFORE:
                raise _failure(seam, method)
            result = await counted(*args, **kwargs)
            if when is When.AFTER:
                raise _failure(seam, method)
            return result

        return made

    def _stream(self, seam: str, method: str, call: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def made(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            when = self._seen(Kind((seam, method, _caller())))
            if when is When.BEFORE:
                raise _failure(seam, method)
            pieces = call(*args, **kwargs)
            following = self.counted(lambda: anext(pieces, _END))
            try:
                while (piece := await following()) is not _END:
                    yield piece
                    if when is When.AFTER:
                        raise _failure(seam, method)
            finally:
                await pieces.aclose()

        return made

    def _seen(self, kind: Kind) -> When | None:
        """Whether this is the call that fails."""
        anybodys = Kind((kind[0], kind[1], ANYBODY))
        asked = ((kind, self.calls[kind]), (anybodys, self._by_method[anybodys]))
        self.calls[kind] += 1
        self._by_method[anybodys] += 1
        fault = self.fault
        if fault is None or self.made or (fault.kind, fault.ordinal) not in asked:
            return None
        self.made = True
        return fault.when


class _Wrapper:
    """An engine behind a seam; its other attributes are its own."""

    def __init__(self, engine: object) -> None:
        self._behind = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


def _faults_at(kind: Kind, ordinal: int) -> Sequence[Fault]:
    # A stream can break in its middle, all the same.
    both = not kind.is_read or kind[1] == "stream"
    return [Fault(kind, ordinal, when) for when in (When if both else (When.BEFORE,))]


def _failure(seam: str, method: str) -> EngineFailed:
    return EngineFailed(f"injected: {seam}.{method}")


def _caller() -> str:
    """The function of Conveyor that makes the call."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_HOME) and not name.endswith(_HELPERS):
            return frame.f_code.co_qualname
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "a task of its own"
