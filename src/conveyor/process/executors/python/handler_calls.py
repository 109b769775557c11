"""Handler calls: their results, and the protocol between a worker and its handler processes.

Both sides use it, so that a call has the same result wherever it runs. A frame is four bytes of length and a
MessagePack value (process/executors/fetch/frames.py); it carries no code and no pickle.
"""

import mmap
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from conveyor.handlers import Context, FetchedPage, Handler, describe_error, storable_text
from conveyor.jobs.body_coding import inflate
from conveyor.model import BodyRef, Outcome, ResultDetail, StoredAs, TaskError, TaskRef
from conveyor.states import TaskStatus

MAX_MESSAGE = 500
CONTENT_TYPE = "application/json"

Say = Callable[[int, int | None, str | None], None]


class CallResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of one call: the JSON that it returned, or an error code and message."""

    body: bytes | None = None
    code: str | None = None
    message: str = ""
    elapsed: float = 0.0


class Setup(msgspec.Struct, frozen=True, array_like=True, tag="setup"):
    """Where the handlers are: an app (handlers.load_app), or modules that register with the default ones."""

    app: str | None
    modules: list[str]
    path: list[str]


class SentPage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A body on its way to the function of `extract`, as it is stored, and its response. The process that calls the
    function inflates the body and decodes the detail."""

    body: memoryview
    # Of the body itself.
    length: int
    stored: StoredAs | None
    http_status: int | None
    # The JSON of a ResultDetail.
    detail: str


class PageCall(TaskRef, frozen=True, array_like=True, gc=False):
    """A call of a handler: with the input of a task, or with a page. A TaskRef is decoded as one without a page."""

    page: SentPage | None = None


class CallBatch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """Calls to make one after the other. `slot` is the place in CallSlots that shows which one runs. After `seconds` no
    further call begins."""

    number: int
    slot: int
    handler: str
    timeout: float
    job_id: str
    run_id: str
    refs: list[PageCall]
    seconds: float


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel a batch."""

    number: int


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag="give_up"):
    """The call at this position of a batch timed out: return the results so far and begin no other call of it."""

    number: int
    position: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The handlers are loaded, or `problem` says why not."""

    problem: str | None = None


class BatchDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Results of a batch, from its first call on; after GiveUp not of all calls. `memory` is in bytes. `is_cut`: the
    other calls were not begun, because those took long."""

    number: int
    results: list[CallResult]
    memory: int = 0
    is_cut: bool = False


class CallProgress(msgspec.Struct, frozen=True, array_like=True, tag="said"):
    """A progress report of a call."""

    number: int
    position: int
    done: int
    total: int | None = None
    note: str | None = None


decode_order = msgspec.msgpack.Decoder(Setup | CallBatch | Cancel | GiveUp).decode
_decode_detail = msgspec.json.Decoder(ResultDetail).decode
decode_answer = msgspec.msgpack.Decoder(Ready | BatchDone | CallProgress).decode


class CallSlots:
    """Memory that a worker shares with one process: which call of each batch runs, and since when. It costs no message
    and outlives the process, so that the worker knows which call killed it and which one is stuck."""

    _slot = struct.Struct("<dq")

    def __init__(self, descriptor: int, count: int) -> None:
        self._table = mmap.mmap(descriptor, max(mmap.PAGESIZE, count * self._slot.size))

    @classmethod
    def size(cls, count: int) -> int:
        return max(mmap.PAGESIZE, count * cls._slot.size)

    def mark(self, slot: int, position: int, now: float) -> None:
        """Mark that the call at this position begins; -1: none. The time is first: a torn read is never too old."""
        self._slot.pack_into(self._table, slot * self._slot.size, now, position + 1)

    def read(self, slot: int) -> tuple[int, float]:
        """Return the running position, or -1, and since when, by the machine's monotonic clock."""
        since, position = self._slot.unpack_from(self._table, slot * self._slot.size)
        return position - 1, since

    def close(self) -> None:
        self._table.close()


def argued(handler: Handler, ref: TaskRef, context: Context | None) -> Any:
    """Call the handler. Returns a value, or a coroutine for an async handler."""
    value = msgspec.json.decode(ref.input)
    page = ref.page if isinstance(ref, PageCall) else None
    if page is not None:
        value = _fetched_page(value, page)
    return handler.function(value) if context is None else handler.function(value, context=context)


def _fetched_page(task_input: Any, page: SentPage) -> FetchedPage:
    detail = _decode_detail(page.detail)
    body = bytes(page.body)
    if page.stored is not None:
        body = inflate(BodyRef("", page.length, "", stored=page.stored), body)
    url = task_input.get("url", "") if isinstance(task_input, dict) else task_input
    return FetchedPage(
        body,
        url=url,
        input=task_input,
        status=page.http_status,
        final_url=detail.final_url,
        content_type=detail.content_type,
        headers=detail.headers or (),
    )


def returned(value: Any, ref: TaskRef) -> CallResult:
    if isinstance(ref, PageCall) and ref.page is not None:
        if value is None:
            return CallResult()
        if not isinstance(value, dict) and not (
            isinstance(value, list) and all(isinstance(each, dict) for each in value)
        ):
            kind = type(value).__name__
            return failed(
                "result_not_json", f"it returned a value of type {kind}; return a dict, a list of dicts or None"
            )
    try:
        return CallResult(msgspec.json.encode(value))
    except Exception as error:
        return failed("result_not_json", f"the result cannot be encoded as JSON: {describe_error(error)}")


def raised(error: BaseException) -> CallResult:
    return failed("handler_raised", describe_error(error))


def timed_out(timeout: float) -> CallResult:
    return failed("timeout", f"the handler took longer than {timeout:g} seconds")


def failed(code: str, message: str) -> CallResult:
    return CallResult(None, code, storable_text(message, MAX_MESSAGE))


def called(handler: Handler, ref: TaskRef, context: Context | None) -> CallResult:
    """Call the handler and return the result. A handler may raise anything; the thread survives."""
    try:
        return returned(argued(handler, ref, context), ref)
    except BaseException as error:
        return raised(error)


def outcome_of(result: CallResult) -> Outcome:
    if result.code is None:
        return Outcome(TaskStatus.SUCCEEDED, body=result.body, content_type=CONTENT_TYPE, elapsed=result.elapsed)
    error = TaskError(result.code, result.message)
    return Outcome(TaskStatus.FAILED, error=error, elapsed=result.elapsed)


def missing(name: str | None, known: list[str]) -> CallResult:
    what = "the job names no handler" if name is None else f"no task is registered as {name!r}"
    return failed("handler_missing", f"{what} (known: {', '.join(known) or 'none; is --app set?'})")
