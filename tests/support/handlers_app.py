"""Handlers for tests, in a module of their own: the processes that run them import it. `handlers` is what they are
registered with; files in a directory that the input names are how they tell what happened."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from conveyor import Context, Handlers, Page

handlers = Handlers()
kept: list[bytes] = []


@handlers.task("double")
def double(value: int) -> int:
    return value * 2


@handlers.task("words")
def words(page: Page) -> dict[str, Any]:
    return {"words": len(page.text.split()), "first": page.text.split()[0]}


@handlers.task("letters")
def letters(page: Page) -> dict[str, Any]:
    return {"letters": sum(map(str.isalpha, page.text))}


@handlers.task("double-async")
async def double_async(value: int) -> int:
    await asyncio.sleep(0)
    return value * 2


@handlers.task("whole")
def whole(value: Any) -> Any:
    return {"got": value, "none": None}


@handlers.task("raises")
def raises(value: str) -> None:
    raise LookupError(value)


@handlers.task("raises-async")
async def raises_async(value: str) -> None:
    raise LookupError(value)


@handlers.task("exits")
def exits(_: Any) -> None:
    sys.exit("stop everything")


@handlers.task("exits-async")
async def exits_async(_: Any) -> None:
    sys.exit("stop everything")


@handlers.task("cancels-itself")
async def cancels_itself(_: Any) -> None:
    raise asyncio.CancelledError


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@handlers.task("unspeakable")
def unspeakable(_: Any) -> None:
    raise Unspeakable


class Exiting(Exception):
    def __str__(self) -> str:
        raise SystemExit


class Hidden:
    def __repr__(self) -> str:
        raise ValueError("no")


class Apart(BaseException):
    """Not an Exception."""


def _misbehave(way: str) -> Any:
    match way:
        case "raises a surrogate":
            raise LookupError("before \ud800 behind")
        case "raises much":
            raise LookupError("\udc80" * 10_000_000)
        case "raises what can not be shown":
            raise KeyError(Hidden())
        case "exits in its text":
            raise Exiting
        case "raises what is no Exception":
            raise Apart("apart")
        case "returns a surrogate":
            return {"text": "before \ud800 behind"}
        case "returns what can not be shown":
            return Hidden()
    return way


@handlers.task("misbehaves")
def misbehaves(way: str) -> Any:
    return _misbehave(way)


@handlers.task("misbehaves-async")
async def misbehaves_async(way: str) -> Any:
    return _misbehave(way)


@handlers.task("says-odd-things")
def says_odd_things(_: Any, context: Context) -> str:
    context.progress(2**70, 2**80, "note \ud800" + "x" * 1000)
    return "done"


@handlers.task("not-json")
def not_json(_: Any) -> object:
    return object()


@handlers.task("times-out-by-itself")
async def times_out_by_itself(_: Any) -> None:
    raise TimeoutError("mine")


@handlers.task("prints")
def prints(value: str) -> str:
    print(value)
    return value


@handlers.task("who")
def who(_: Any) -> dict[str, Any]:
    """The process that it runs in, and what it can see of the settings."""
    settings = [name for name in os.environ if name.startswith("CONVEYOR_")]
    return {"pid": os.getpid(), "parent": os.getppid(), "settings": settings, "main": sys.modules["__main__"].__file__}


@handlers.task("naps")
def naps(value: dict[str, Any]) -> int:
    """Sleeps where a number of them is told to; writes down who began."""
    note(value, "began")
    time.sleep(value.get("seconds", 0))
    return int(value["number"])


@handlers.task("naps-async")
async def naps_async(value: dict[str, Any]) -> int:
    note(value, "began")
    await asyncio.sleep(value.get("seconds", 0))
    return int(value["number"])


@handlers.task("blocks-the-loop")
async def blocks_the_loop(value: dict[str, Any]) -> int:
    note(value, "began")
    time.sleep(value.get("seconds", 0))  # noqa: ASYNC251  (that is its point)
    return int(value["number"])


@handlers.task("holds-the-interpreter")
def holds_the_interpreter(value: dict[str, Any]) -> int:
    note(value, "began")
    # PyDLL keeps the lock while it waits.
    ctypes.PyDLL(None).usleep(int(value.get("seconds", 0) * 1_000_000))
    return int(value["number"])


@handlers.task("kills")
def kills(value: dict[str, Any]) -> int:
    """Takes its process along as often as the input says."""
    note(value, "began")
    if len(list(Path(value["place"]).glob(f"began-{value['number']}-*"))) <= value.get("times", 0):
        os.kill(os.getpid(), getattr(signal, value.get("signal", "SIGKILL")))
        time.sleep(30)
    time.sleep(value.get("seconds", 0))
    return int(value["number"])


@handlers.task("quits")
def quits(_: Any) -> None:
    os._exit(3)


@handlers.task("leaks")
def leaks(mib: int) -> int:
    kept.append(os.urandom(1024) * 1024 * mib)
    return os.getpid()


@handlers.task("tells")
def tells(value: dict[str, Any], context: Context) -> dict[str, Any]:
    for step in range(value["steps"]):
        context.progress(step + 1, value["steps"], f"step {step + 1}")
        context.check()
        time.sleep(value.get("seconds", 0))
    context.heartbeat()
    return {"job": context.job_id, "run": context.run_id, "index": context.index, "attempt": context.attempt}


@handlers.task("tells-async")
async def tells_async(value: dict[str, Any], *, context: Context) -> dict[str, Any]:
    context.progress(1, 2)
    await asyncio.sleep(value.get("seconds", 0))
    context.heartbeat()
    return {"job": context.job_id, "run": context.run_id, "index": context.index, "attempt": context.attempt}


@handlers.task("until-cancelled")
def until_cancelled(value: dict[str, Any], context: Context) -> None:
    note(value, "began")
    while not context.cancelled:
        context.heartbeat()
        time.sleep(0.01)
    note(value, "cancelled")
    context.check()


@handlers.task("until-cancelled-async")
async def until_cancelled_async(value: dict[str, Any]) -> None:
    note(value, "began")
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        note(value, "cancelled")
        raise


def note(value: dict[str, Any], what: str) -> None:
    if "place" in value:
        (Path(value["place"]) / f"{what}-{value['number']}-{time.monotonic_ns()}").touch()


@handlers.task("forks-and-dies")
def forks_and_dies(value: dict[str, Any]) -> int:
    """Leaves a process behind that has all that this one had open."""
    note(value, "began")
    if len(list(Path(value["place"]).glob(f"began-{value['number']}-*"))) == 1:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        os._exit(1)
    return int(value["number"])


@handlers.task("takes-its-time")
def takes_its_time(value: list[Any]) -> None:
    """Writes when it starts and ends, by the machine's clock."""
    path, seconds = value
    with Path(path).open("a") as file:
        file.write(f"start {time.monotonic()}\n")
        file.flush()
        time.sleep(seconds)
        file.write(f"end {time.monotonic()}\n")
