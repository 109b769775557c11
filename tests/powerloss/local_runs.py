"""`conveyor run` while the power fails: records commands that write an archive, a directory of files and a table, some
of them stopped and resumed; and does what a user does afterwards."""

import asyncio
import io
import json
import random
import secrets
import zipfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from structlog.testing import capture_logs

import conveyor.embedded
import conveyor.system
import conveyor.telemetry.logs
from conveyor.cli import bar, local_run
from conveyor.cli import loop as command_loop
from conveyor.cli.output_file import output_spec
from conveyor.cli.run_directory import check_out, default_data, has_unfinished_run
from conveyor.client.export_folder import check_folder
from conveyor.embedded import Embedded
from conveyor.engines import local_logs
from conveyor.engines.sqlite import database, shrinking
from conveyor.export import growing, growing_directory
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.machine.loop import LoopClock, VirtualLoop
from tests.powerloss.check import FAILURES, Broken, expect
from tests.powerloss.disk import Image
from tests.powerloss.ledger import Entry, Known, Ledger, Told
from tests.powerloss.life import SETTINGS, RecordedDatabase, Work, executors_of, origin_of, seconds_of
from tests.powerloss.origin import WAYS, file_at
from tests.powerloss.recorder import Recorder
from tests.powerloss.recording import LOG_BYTES, Recording
from tests.powerloss.vfs import recorded_databases
from tests.support.places import quick_place

# Neighbours that an archive packs together.
_ROWS = 5
_INVALID = "this line is not a URL"
EXIT_CODES = (0, 3)


class Command(NamedTuple):
    """`conveyor run LIST -o OUT`."""

    out: str
    kind: str
    lines: list[str]

    @property
    def tasks(self) -> dict[int, str]:
        """The URL of each task, by its index."""
        return {index: line for index, line in enumerate(self.lines) if line != _INVALID}

    @property
    def is_directory(self) -> bool:
        return "." not in self.out

    @property
    def list_name(self) -> str:
        return f"list-{self.out}.txt"


def commands_of(chance: random.Random) -> list[Command]:
    def pages(name: str, count: int) -> list[str]:
        return [f"http://target.test/{name}/{number}" for number in range(count)]

    files = [f"http://files.test/run/{how}/{chance.getrandbits(16)}" for how in WAYS]
    mixed = [*pages("mixed", chance.randint(3, 20)), _INVALID, *pages("more", 2)]
    commands = [
        Command("pages.zip", "fetch", pages("zip", chance.randint(12, 40))),
        Command("pages", "fetch", pages("directory", chance.randint(12, 40))),
        Command("files", "download", files),
        Command("mixed.zip", "fetch", mixed),
        Command("table.jsonl", "fetch", mixed),
    ]
    chance.shuffle(commands)
    return commands


def recorded_runs(seed: int, wanted: Sequence[str] = ()) -> Recording:
    """Record commands, one after the other: all, or those that write these files."""
    with quick_place() as place, pytest.MonkeyPatch.context() as patch, capture_logs():
        chance = random.Random(seed)
        patch.setattr(secrets, "token_hex", lambda size: f"{chance.getrandbits(8 * size):0{2 * size}x}")
        patch.setattr(database, "SqliteDatabase", RecordedDatabase)
        patch.setattr(local_logs, "LOG_BYTES", LOG_BYTES)
        patch.setattr(shrinking, "KEPT_PAGES", 0)
        commands = [command for command in commands_of(chance) if not wanted or command.out in wanted]
        lists = Image({Path(each.list_name): "\n".join(each.lines).encode() for each in commands}, [])
        lists.write(place)
        loop = VirtualLoop()
        record = Recorder(place, loop.time)
        record.adopt(lists)
        ledger = Ledger(record)
        try:
            with recorded_databases(record), record.recording():
                for number, command in enumerate(commands):
                    at = ledger.asking()
                    stop = chance.uniform(0.02, 1.0) if chance.random() < 0.5 else None
                    code = run_once(place, command, loop, seed + number, is_first=True, stop=stop)
                    if code not in EXIT_CODES:
                        code = run_once(place, command, loop, seed + number, is_first=True)
                    assert code in EXIT_CODES, f"{command.out} ended with {code}"
                    ledger.tell(Told.RUN, command.out, (command, digests_of(place, command)), at)
        finally:
            loop.close()
        record.check_complete()
        return Recording(seed, record, ledger, check_runs)


def check_runs(place: Path, loop: VirtualLoop, seed: int, known: Known) -> None:
    """Outputs of commands that ended are what they were; the command that ran is given again, as a user does it."""
    for entry in known.of(Told.RUN):
        command, digests = entry.detail
        expect(digests_of(place, command) == digests, f"{command.out} is another one")
        _expect_no_data(place, command)
    for entry in known.under_way:
        _check_begun(place, loop, seed, entry)


def _check_begun(place: Path, loop: VirtualLoop, seed: int, entry: Entry) -> None:
    command: Command = entry.detail[0]
    out = place / command.out
    is_unfinished = has_unfinished_run(out, None)
    # Published, and its data removed: nobody said so yet.
    if is_unfinished or not out.exists():
        try:
            (check_folder if command.is_directory else check_out)(out, is_unfinished)
            code = run_once(place, command, loop, seed, is_first=False)
        except FAILURES as error:
            raise Broken(f"{command.out}: {type(error).__name__}: {error}") from error
        expect(code in EXIT_CODES, f"{command.out} ended with {code}")
    check_output(place, command)
    if is_unfinished:
        _expect_no_data(place, command)


def _expect_no_data(place: Path, command: Command) -> None:
    data = default_data(place / command.out)
    for left in (data, data.with_name(f"{data.name}.removed")):
        expect(not left.exists(), f"{left.name} is there after its command has ended")


def check_output(place: Path, command: Command) -> None:
    """The output is whole: every task once, in the order of the list, with its body."""
    out = place / command.out
    lines, bodies = read_output(out)
    indexes = [line["index"] for line in lines]
    expect(indexes == list(command.tasks), f"{out.name} has the tasks {indexes}")
    for line in lines:
        url = command.tasks[line["index"]]
        expect(line["input"] == url, f"{out.name} has {line['input']} for {url}")
        fails = command.kind == "fetch" and line["index"] % 11 == 5
        expect(line["status"] == ("failed" if fails else "succeeded"), f"{out.name}: {url} {line['status']}")
        if command.kind == "download":
            expect(line["sha256"] == sha256(file_at(url)).hexdigest(), f"{out.name}: {url} is another file")
        if bodies is not None and not fails:
            body = bodies.get(line["file"])
            expect(body is not None, f"{out.name} has no {line['file']}")
            assert body is not None
            expect(sha256(body).hexdigest() == line["sha256"], f"{out.name}: {line['file']} has other bytes")
    if bodies is not None:
        named = {line["file"] for line in lines if line.get("file")}
        expect(set(bodies) == named, f"{out.name} has {sorted(set(bodies) - named)} besides")
    left = [path.name for path in place.iterdir() if ".part" in path.name]
    expect(not left, f"{left} is left")
    invalid = len(command.lines) - len(command.tasks)
    if invalid:
        said = out.with_name(f"{out.name}.invalid.jsonl")
        expect(said.exists() and len(said.read_bytes().splitlines()) == invalid, f"{said.name} is not whole")


def read_output(out: Path) -> tuple[list[dict[str, Any]], dict[str, bytes] | None]:
    """The lines of a manifest, and the bodies, if it has some."""
    if out.suffix == ".jsonl":
        return [json.loads(line) for line in out.read_bytes().splitlines()], None
    if out.suffix == ".zip":
        try:
            with zipfile.ZipFile(out) as archive:
                files = {name: archive.read(name) for name in archive.namelist()}
        except (zipfile.BadZipFile, EOFError) as error:
            raise Broken(f"{out.name}: {error}") from error
    else:
        files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    manifest = files.pop("manifest.jsonl", None)
    expect(manifest is not None, f"{out.name} has no manifest")
    assert manifest is not None
    return [json.loads(line) for line in manifest.splitlines()], files


def digests_of(place: Path, command: Command) -> Mapping[str, str]:
    """The sha256 of each file of the output."""
    out = place / command.out
    paths = [path for path in (out, *out.rglob("*"), *place.glob(f"{out.name}.invalid.jsonl")) if path.is_file()]
    return {str(path.relative_to(place)): sha256(path.read_bytes()).hexdigest() for path in paths}


class Left(Exception):
    """The command exits at once."""


def run_once(
    place: Path, command: Command, loop: VirtualLoop, seed: int, *, is_first: bool, stop: float | None = None
) -> int:
    """One process: the command, with --resume if there is an unfinished run. `stop` is when the user stops it."""
    out = place / command.out
    data = default_data(out)
    plan = local_run.RunPlan(
        lists=[str(place / command.list_name)],
        # An origin that fails first does so for each process.
        spec={"kind": command.kind, "attempts": 3, "backoff": {"base": 0.1}, "chunk_size": 5},
        out=out,
        settings=Settings.load({}, data=data, **SETTINGS),
        resume=has_unfinished_run(out, None),
        temporary=True,
        title=out.name,
        output=output_spec(out, None, None, command.is_directory),
        is_directory=command.is_directory,
    )
    with _on_loop(loop, seed, stop, is_first=is_first), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            return local_run.run_here(plan, as_json=True)
        except Left as left:
            return int(left.args[0])


@contextmanager
def _on_loop(loop: VirtualLoop, seed: int, stop: float | None, *, is_first: bool) -> Iterator[None]:
    """Commands that run meanwhile do so on this loop, as the tasks of the recorded lives do."""
    clock = LoopClock(loop, seed)

    @asynccontextmanager
    async def opened(settings: Settings) -> AsyncIterator[System]:
        async with open_system(settings, clock) as system:
            yield system
            # A process that ends unlocks its logs.
            blobs: Any = system.blobs
            blobs.close()

    def embedded(system: System, **_: Any) -> Embedded:
        work = Work(clock, seed, seconds_of(is_first=is_first))
        origin = origin_of(clock, is_first=is_first)
        return Embedded(system, executors_of(system, clock, work, origin, fetches=is_first))

    class StopAt:
        """In place of signals."""

        exit_code = 130

        def __init__(self, on_first: Callable[[], None], drain_seconds: float) -> None:
            self.event = asyncio.Event()

        def listen(self) -> None:
            if stop is not None:
                loop.call_later(stop, self.event.set)

    def leave(exit_code: int) -> None:
        raise Left(exit_code)

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        return loop.run_until_complete(main)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conveyor.system, "open_system", opened)
        patch.setattr(conveyor.embedded, "Embedded", embedded)
        patch.setattr(conveyor.telemetry.logs, "configure_log", lambda *args, **options: None)
        patch.setattr(bar, "progress_bar", lambda title: nullcontext(lambda view: None))
        patch.setattr(command_loop, "run_async", run)
        patch.setattr(command_loop, "Stop", StopAt)
        patch.setattr(command_loop, "leave", leave)
        patch.setattr(command_loop, "freeze_loaded_objects", lambda: None)
        patch.setattr(growing, "ROWS", _ROWS)
        patch.setattr(growing_directory, "ROWS", _ROWS)
        yield
