"""`conveyor run` keeps what was fetched: however it ends, the data stays until the archive of all of it is there."""

import asyncio
import gzip
import io
import json
import threading
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import conveyor
from conveyor import system as systems
from conveyor.cli import local_run, loop
from conveyor.cli import run_directory as place
from conveyor.cli.guard import run_guarded
from conveyor.clock import SystemClock
from conveyor.errors import EngineFailed, ListUnreadable
from conveyor.export import growing
from conveyor.ingest import pipeline
from conveyor.lists.reader import ListBatch, ListReading, read
from tests.support.places import quick_place

# More than is read to know a list by, and than two batches of its ingest: what is cut off before that was never begun.
LINES = [f"line {number} " + "x" * 110 for number in range(4000)]
WHOLE = gzip.compress("".join(f"{line}\n" for line in LINES).encode(), mtime=0)
CUT = WHOLE[: len(WHOLE) * 2 // 3]
DAY = 86_400.0
# Tasks that are to be finished when the list turns out unreadable.
FETCHED = 100


@conveyor.task("kept.shout")
def shout(text: str) -> str:
    with Shout.lock:
        Shout.calls.append(text)
        if len(Shout.calls) > 2 * FETCHED:
            # Half of them are recorded by then: more are never under way at once.
            Shout.enough.set()
    return text.upper()


class Shout:
    """What the handler was called with."""

    lock = threading.Lock()
    enough = threading.Event()
    calls: list[str] = []  # noqa: RUF012  (shared with the handler on purpose)


@dataclass
class Ended:
    """What a command came to."""

    code: int
    said: str
    report: dict[str, Any] = field(default_factory=dict)


class Desk:
    """`conveyor run` in this process, in a directory of its own."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.patch = patch
        self.out = directory / "out.zip"
        self.data = directory / "out.zip.conveyor"
        self.list = directory / "list.txt.gz"

    def run(self, *more: str) -> Ended:
        Shout.calls.clear()
        Shout.enough.clear()
        if "--resume" in more:
            # What is there already is not called again.
            Shout.enough.set()
        arguments = ["run", str(self.list), "-o", str(self.out), "--handler", "kept.shout", "--on-invalid", "skip"]
        with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as said:
            code = run_guarded([*arguments, "--concurrency", "64", "--json", *more])
        return Ended(code, said.getvalue(), json.loads(printed.getvalue() or "{}"))

    def manifest(self) -> list[dict[str, Any]]:
        with zipfile.ZipFile(self.out) as archive:
            assert archive.testzip() is None
            return [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]

    def succeeded(self) -> set[str]:
        return {line["input"] for line in self.manifest() if line["status"] == "succeeded"}

    def later(self, days: float) -> None:
        """Let some days have passed."""

        class Later(SystemClock):
            def now(self) -> float:
                return super().now() + days * DAY

        self.patch.setattr(systems, "SystemClock", Later)


@contextmanager
def desk() -> Iterator[Desk]:
    with quick_place() as directory, pytest.MonkeyPatch.context() as patch:
        # A thread has a loop of its own, and no signals.
        patch.setattr(loop, "run_async", _in_a_thread)
        patch.setattr(loop.Stop, "listen", lambda _: None)
        patch.setattr(loop, "freeze_loaded_objects", lambda: None)
        patch.setattr(pipeline, "read", _read_late)
        patch.setenv("CONVEYOR_HANDLER_PROCESSES", "0")
        patch.setenv("CONVEYOR_LOG_LEVEL", "error")
        patch.delenv("CONVEYOR_DATA", raising=False)
        yield Desk(directory, patch)


def _in_a_thread(main: Coroutine[Any, Any, Any]) -> Any:
    outcome: list[Callable[[], Any]] = []

    def work() -> None:
        try:
            result = asyncio.run(main)
            outcome.append(lambda: result)
        except BaseException as error:
            failure = error

            def again() -> None:
                raise failure

            outcome.append(again)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return outcome[0]()


async def _read_late(pieces: AsyncIterator[bytes], reading: ListReading) -> AsyncGenerator[ListBatch, None]:
    """A list is as large as users have them: some of it was run when its end is reached."""
    try:
        async for batch in read(pieces, reading):
            yield batch
    except ListUnreadable:
        await asyncio.to_thread(Shout.enough.wait, 30)
        raise


def what_was_fetched_is_kept() -> None:
    """A list that is cut off: what there is gets exported, the data stays, and the whole list goes on from there."""
    with desk() as at:
        at.list.write_bytes(CUT)
        first = at.run()
        assert first.code == 2
        assert "list_unreadable" in first.said
        assert at.data.is_dir(), "what was fetched is gone"
        assert "out.zip.conveyor" in first.said and "--resume" in first.said
        kept = at.succeeded()
        assert len(kept) >= FETCHED
        assert first.report["complete"] is False
        assert len(at.manifest()) == first.report["job"]["run"]["total"] < len(LINES)

        at.list.write_bytes(WHOLE)
        second = at.run("--resume")
        assert (second.code, second.report["complete"]) == (0, True), second.said
        assert [line["input"] for line in at.manifest()] == LINES
        assert at.succeeded() == set(LINES)
        assert not kept & set(Shout.calls), "what was kept was run again"
        assert not at.data.exists()


def an_unfinished_run_is_not_purged() -> None:
    """Three weeks later everything is still there, and goes on."""
    with desk() as at:
        at.list.write_bytes(CUT)
        assert at.run().code == 2
        kept = at.succeeded()
        at.later(days=21)
        at.list.write_bytes(WHOLE)
        again = at.run("--resume")
        assert again.code == 0, again.said
        assert at.succeeded() == set(LINES)
        assert not kept & set(Shout.calls), "what was kept was run again"


def test_what_was_fetched_is_kept() -> None:
    what_was_fetched_is_kept()


def test_an_unfinished_run_is_not_purged() -> None:
    an_unfinished_run_is_not_purged()


def test_a_list_that_is_still_unreadable() -> None:
    """Again the same error, and nothing is lost; a list that is worse costs nothing either."""
    with desk() as at:
        at.list.write_bytes(CUT)
        assert at.run().code == 2
        kept = at.succeeded()
        again = at.run("--resume")
        assert again.code == 2
        assert "list_unreadable" in again.said
        assert at.succeeded() >= kept
        kept = at.succeeded()

        for worse in (WHOLE[:5], b"", b"\x1f\x8brubbish"):
            at.list.write_bytes(worse)
            refused = at.run("--resume")
            assert (refused.code, at.data.is_dir()) == (2, True), refused.said
            assert at.succeeded() >= kept, "an archive with more in it was overwritten"

        at.list.write_bytes(WHOLE)
        assert at.run("--resume").code == 0
        assert at.succeeded() == set(LINES)
        assert not kept & set(Shout.calls), "what was kept was run again"


def test_lines_that_were_changed_are_run() -> None:
    with desk() as at:
        at.list.write_bytes(CUT)
        assert at.run().code == 2
        kept = at.succeeded()
        changed = sorted(kept, key=LINES.index)[:5]
        mended = [f"new {line}" if line in changed else line for line in LINES]
        at.list.write_bytes(gzip.compress("".join(f"{line}\n" for line in mended).encode()))
        assert at.run("--resume").code == 0
        assert [line["input"] for line in at.manifest()] == mended
        assert {f"new {line}" for line in changed} <= set(Shout.calls)
        assert not (kept - set(changed)) & set(Shout.calls)


def test_a_crash_while_results_are_taken_over() -> None:
    """Before and after a write of it: whoever comes next does the rest."""

    class Died(BaseException):
        pass

    for point in ("takeover.before", "takeover.after"):
        with desk() as at:
            at.list.write_bytes(CUT)
            assert at.run().code == 2
            kept = at.succeeded()
            at.list.write_bytes(WHOLE)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("conveyor.cli.takeover.crashpoint", _raising(point, Died))
                with pytest.raises(Died):
                    at.run("--resume")
            assert at.run("--resume").code == 0
            assert [line["input"] for line in at.manifest()] == LINES
            assert not kept & set(Shout.calls), "what was kept was run again"


def _raising(point: str, error: type[BaseException]) -> Callable[[str], None]:
    def crashpoint(name: str) -> None:
        if name == point:
            raise error

    return crashpoint


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError(28, "No space left on device"), "os_error"), (EngineFailed("damaged"), "engine_failed")],
)
def test_an_archive_that_can_not_be_written(error: Exception, code: str) -> None:
    with desk() as at:
        at.list.write_bytes(WHOLE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(growing, "publish", _failing(error))
            failed = at.run()
        assert failed.code == 1
        assert f"[{code}]" in failed.said
        assert "kept in" in failed.said and "--resume" in failed.said
        assert not at.out.exists()
        assert at.data.is_dir()
        assert at.run("--resume").code == 0
        assert at.succeeded() == set(LINES)
        assert Shout.calls == [], "all of it was there"


def test_an_archive_that_fails_while_it_grows_is_made_at_the_end() -> None:
    tried = []

    def fail(*_: object) -> None:
        tried.append(True)
        raise OSError(28, "No space left on device")

    with desk() as at:
        at.list.write_bytes(WHOLE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(growing, "ROWS", 200)
            patch.setattr(growing.GrowingArchive, "_take_lines", fail)
            assert at.run().code == 0
        assert tried, "it had begun"
        assert at.succeeded() == set(LINES)
        assert sorted(each.name for each in at.out.parent.iterdir() if "out.zip" in each.name) == ["out.zip"]


def _failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_run_that_was_interrupted_does_not_expire() -> None:
    with desk() as at:
        at.list.write_bytes(WHOLE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_run, "_follow", _failing(OSError(28, "No space left on device")))
            assert at.run().code == 1
        at.later(days=4000)
        assert at.run("--resume").code == 0
        assert at.succeeded() == set(LINES)


def test_a_run_that_has_expired_is_delivered_as_it_is() -> None:
    with desk() as at:
        at.list.write_bytes(CUT)
        assert at.run().code == 2
        kept = at.succeeded()
        at.out.unlink()
        at.later(days=400)
        again = at.run("--resume")
        assert again.code == 1
        assert "expired" in again.said
        assert at.succeeded() == kept
        assert at.data.is_dir()


def test_a_finished_run_that_has_expired_is_delivered_whole() -> None:
    """Its archive could not be written, and the user came back a year later."""
    with desk() as at:
        at.list.write_bytes(WHOLE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(growing, "publish", _failing(OSError(28, "No space left on device")))
            assert at.run().code == 1
        at.later(days=400)
        assert at.run("--resume").code == 0
        assert at.succeeded() == set(LINES)
        assert not at.data.exists()


def test_a_directory_that_was_there_is_left() -> None:
    """It may hold what others come back for."""
    with desk() as at:
        at.list.write_bytes(WHOLE)
        at.data.mkdir()
        (at.data / "theirs").write_text("keep me")
        assert at.run().code == 0
        assert (at.data / "theirs").read_text() == "keep me"
        assert place.read_mark(at.data) is None
