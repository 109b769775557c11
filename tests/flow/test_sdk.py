"""The SDK against real servers: from a list to results, through restarts, in threads, scripts and a notebook."""

import ast
import asyncio
import gzip
import json
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from jupyter_client.manager import KernelManager

from conveyor import AsyncClient, Client, Event, Progress, errors
from conveyor.settings import Settings
from tests.support.api import Api
from tests.support.demo_site import demo_site
from tests.support.up_process import ROOT, Up, environment, running
from tests.support.working import Flaky, working

T = TypeVar("T")

PATIENCE = 60.0


@pytest.fixture
async def client(server: Api) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, server.key) as made:
        yield made


async def blocking(server: Api, use: Callable[[Client], T]) -> T:
    """What a program without an event loop does, while ours serves it."""

    def call() -> T:
        with Client(server.url, server.key) as made:
            return use(made)

    return await asyncio.to_thread(call)


def urls(count: int) -> Iterator[str]:
    return (f"http://example.com/{number}" for number in range(count))


async def test_from_a_list_to_results(server: Api, tmp_path: Path) -> None:
    def use(client: Client) -> None:
        job = client.submit(urls(60), name="pages", attempts=1, backoff={"base": 0.1})
        assert job.wait(timeout=PATIENCE) is job
        assert (job.state, job.total, job.succeeded, job.failed) == ("completed", 60, 58, 2)
        assert not job.ok
        assert job.errors == {"http_404": 2}
        failed = sorted(job.results(status="failed"), key=lambda result: result.index)
        assert [result.input for result in failed] == ["http://example.com/7", "http://example.com/8"]
        assert failed[0].error is not None
        assert (failed[0].error.code, failed[0].http_status, failed[0].ok) == ("http_404", 404, False)
        results = list(job.results(page_size=7))
        assert sorted(result.index for result in results) == list(range(60))
        first = next(result for result in results if result.index == 3)
        assert json.loads(job.body(first)) == "http://example.com/3"
        assert job.task(first.task_id) == first
        assert job.save(first, tmp_path / "body").read_bytes() == job.body(first.task_id)
        with pytest.raises(errors.NoBody):
            job.body(failed[0])
        assert next(job.events()).event == "job.accepted"
        assert [event.event for event in job.events(failed[0].task_id)] == ["task.failed"]

        flaky.fails = lambda job, index: None
        assert job.rerun(failed=True, attempts=2).wait(timeout=PATIENCE).ok
        assert (job.total, job.succeeded, job.failed, job.data["run"]["number"]) == (60, 60, 0, 2)
        assert (job.data["run"]["total"], job.errors) == (2, {})
        assert sum(result.ok for result in job.results()) == 60
        assert len(list(job.results(run="latest"))) == 2
        assert client.job(job.id, run=2).total == 2
        assert len(list(job.results(run=1))) == 60
        assert job.refresh(verify=True).data["verify"]["drift"] == 0

        assert [found.id for found in client.jobs()] == [job.id]
        assert client.job(job.id).name == "pages"
        job.delete()
        with pytest.raises(errors.NotFound):
            job.refresh()

    flaky = Flaky(lambda job, index: 404 if index in (7, 8) else None)
    async with working(server.system, flaky):
        await blocking(server, use)


async def test_the_same_on_a_loop(server: Api, client: AsyncClient, tmp_path: Path) -> None:
    async def tasks() -> AsyncIterator[str]:
        for url in urls(2500):
            yield url

    async with working(server.system):
        job = await client.submit(tasks(), name="pages")
        told = [each async for each in job.stream()]
        await job.wait(timeout=PATIENCE)
        assert job.ok
        assert job.total == 2500
        events = [each for each in told if isinstance(each, Event)]
        assert [events[0].event, events[-1].event] == ["job.accepted", "run.completed"]
        assert isinstance(told[0], Progress)
        assert sorted([result.index async for result in job.results()]) == list(range(2500))
        [archive] = await job.export(tmp_path / "out.zip")
        with zipfile.ZipFile(archive) as opened:
            assert len(opened.namelist()) == 2501
            assert opened.testzip() is None
        [lines] = await job.export(tmp_path / "out.jsonl.gz", bodies="text", status="succeeded")
        rows = [json.loads(line) for line in gzip.decompress(lines.read_bytes()).splitlines()]
        assert [row["index"] for row in rows] == list(range(2500))
        assert json.loads(rows[9]["body"]) == "http://example.com/9"
        made = [export async for export in job.exports()]
        assert [export.state for export in made] == ["ready", "ready"]
        assert (await made[0].manifest())["counts"]["tasks"] == 2500
        await made[0].delete()
        with pytest.raises(errors.NotFound):
            await client.export(made[0].id)
        assert [found.id async for found in client.jobs()] == [job.id]
        with pytest.raises(errors.NothingToRerun):
            await job.rerun(failed=True)


@pytest.mark.parametrize("name", ["list.txt", "list.jsonl.gz", "list.csv"])
async def test_a_file(server: Api, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines = {"list.txt": "{}\n", "list.jsonl.gz": '{{"url": "{}"}}\n', "list.csv": "{}\n"}[name]
    text = ("url\n" if name.endswith("csv") else "") + "".join(lines.format(url) for url in urls(40))
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())

    def use(client: Client) -> None:
        for given in (path, str(path)):
            assert client.submit(given).wait(timeout=PATIENCE).succeeded == 40
        with path.open("rb") as file:
            assert client.submit(file).wait(timeout=PATIENCE).succeeded == 40

    async with working(server.system):
        await blocking(server, use)


async def test_lines_that_are_no_task(server: Api) -> None:
    def use(client: Client) -> None:
        mixed = [*urls(1500), "no url", {"url": "ftp://example.com"}]
        job = client.submit(mixed).wait(timeout=PATIENCE)
        assert (job.total, job.invalid) == (1500, 2)
        assert [line.line for line in job.invalid_lines()] == [1501, 1502]
        assert job.error_groups(run=1)["failed"] == 0
        assert "items" in job.hosts()
        refused = client.submit(mixed, on_invalid="reject").wait(timeout=PATIENCE)
        assert (refused.state, refused.total) == ("failed", 0)
        # Those of a short list are treated alike, and a repeated call makes no second job.
        short = [*urls(3), "no url", *urls(2), {"url": "ftp://example.com"}]
        few = client.submit(short, idempotency_key="short")
        assert few.invalid == 2
        few.wait(timeout=PATIENCE)
        assert (few.total, few.invalid, few.succeeded) == (5, 2, 5)
        assert [line.line for line in few.invalid_lines()] == [4, 7]
        assert client.submit(short, idempotency_key="short").id == few.id
        with pytest.raises(errors.InvalidTasks):
            client.submit(short, on_invalid="reject")
        with pytest.raises(errors.InvalidTasks) as caught:
            client.submit(["no url"])
        assert caught.value.details["errors"][0]["index"] == 0
        with pytest.raises(errors.InvalidField):
            client.submit(["http://example.com"], concurrency=-1)
        with pytest.raises(errors.UnknownField):
            client.submit(["http://example.com"], colour="red")  # type: ignore[call-arg]

    async with working(server.system):
        await blocking(server, use)


async def test_one_job_however_often_it_is_sent(server: Api) -> None:
    def use(client: Client) -> None:
        for count in (10, 3000):
            first, second = (
                client.submit(urls(count), idempotency_key=f"once {count}".replace(" ", "-")) for _ in "ab"
            )
            assert first.id == second.id
            with pytest.raises(errors.IdempotencyMismatch):
                client.submit(urls(count + 1), idempotency_key=f"once-{count}")
        upload = client.upload(urls(5))
        assert {client.submit(upload, idempotency_key=key).id for key in "aab"} == {
            client.submit(upload, idempotency_key="a").id,
            client.submit(upload, idempotency_key="b").id,
        }

    await blocking(server, use)


async def test_an_open_job(server: Api) -> None:
    def use(client: Client) -> None:
        job = client.open_job(name="as they come")
        assert job.add(urls(2300)) == 2300
        assert job.add([]) == 0
        assert (job.add(["no url"]), job.invalid) == (0, 1)
        job.add(["http://example.com/last"], last=True)
        assert job.wait(timeout=PATIENCE).succeeded == 2301
        with pytest.raises(errors.JobClosed):
            job.add(["http://example.com/late"])
        assert client.open_job().close().wait(timeout=PATIENCE).total == 0

    async with working(server.system):
        await blocking(server, use)


async def test_a_job_under_way(server: Api) -> None:
    def use(client: Client) -> None:
        job = client.submit(urls(30))
        assert job.pause().state == "paused"
        with pytest.raises(TimeoutError):
            job.wait(timeout=0.2)
        assert job.change(attempts=9, gateway=None).data["options"]["attempts"] == 9
        assert job.resume().state == "running"
        assert job.cancel().wait(timeout=PATIENCE).state == "cancelled"
        with pytest.raises(errors.JobEnded):
            job.pause()
        gate()
        assert job.rerun(cancelled=True).wait(timeout=PATIENCE).ok

    async with working(server.system) as echo:
        echo.gate.clear()
        loop = asyncio.get_running_loop()

        def gate() -> None:
            loop.call_soon_threadsafe(echo.gate.set)

        await blocking(server, use)


async def test_keys_and_strangers(server: Api) -> None:
    def use(client: Client) -> None:
        with Client(server.url, "cv_nobody_secret") as stranger, pytest.raises(errors.InvalidKey):
            next(stranger.jobs())
        with pytest.raises(errors.Forbidden):
            client.create_key("acme")
        with pytest.raises(errors.NotFound):
            client.job("job_unknown")
        assert client.health()["status"] == "ok"
        assert list(client.dead_letters()) == []
        assert client.redrive([]) == {"redriven": 0, "skipped": 0, "runs": [], "requeued": 0, "blocked": 0}
        with pytest.raises(errors.RouteNotFound):
            client.request("GET", "/v1/nothing")

    await blocking(server, use)


class TestFull:
    """A server that takes no more for now."""

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        return Settings.load({}, data=tmp_path / "data", tenant_jobs=1)

    async def test_it_is_said_with_the_time_to_wait(self, server: Api) -> None:
        def use() -> None:
            with Client(server.url, server.key, patience=0.0) as client:
                client.submit(urls(1))
                with pytest.raises(errors.QuotaExceeded) as caught:
                    client.submit(urls(1))
                assert caught.value.details["retry_after"] > 0

        await asyncio.to_thread(use)


# Through restarts


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    with running(tmp_path, "--app", "tests.stacks.app") as started:
        yield started


@pytest.fixture
def site() -> Iterator[str]:
    """Pages that are slow enough for a server to be killed between them."""
    with demo_site() as url:
        yield url


# It starts a server seven times.
@pytest.mark.timeout(240)
def test_waiting_and_streaming_outlast_the_server(up: Up, site: str, tmp_path: Path) -> None:
    """Killed three times: every event is told once, in order; every task has a result; the archive is whole."""
    told: list[Event | Progress] = []
    with Client(up.url, up.key) as client:
        job = client.submit((f"{site}/quick/{number}" for number in range(1200)), rate_per_host=150, concurrency=50)

        def follow() -> None:
            told.extend(client.job(job.id).stream())

        follower = threading.Thread(target=follow)
        follower.start()
        kills = 0

        def kill(now: Any) -> None:
            nonlocal kills
            if kills < 3 and now.done > (kills + 1) * 250:
                kills += 1
                up.kill()
                up.start()

        job.wait(timeout=2 * PATIENCE, progress=kill)
        follower.join(PATIENCE)
        assert not follower.is_alive()
        assert kills == 3
        assert job.ok
        assert job.succeeded == 1200
        events = [each for each in told if isinstance(each, Event)]
        assert [event.id for event in events] == [event.id for event in job.events()]
        assert [events[0].event, events[-1].event] == ["job.accepted", "run.completed"]
        counts = [each.counts.succeeded for each in told if isinstance(each, Progress)]
        assert counts[-1] == 1200

        seen = []
        for number, result in enumerate(job.results(page_size=100)):
            seen.append(result.index)
            if number == 777:
                up.kill()
                up.start()
        assert sorted(seen) == list(range(1200))

        export = job.start_export(format="zip")
        up.kill()
        up.start()
        up_again = threading.Timer(0.2, up.kill)
        up_again.start()
        up_again.join()
        up.start()
        [archive] = export.wait().download(tmp_path / "out.zip")
        with zipfile.ZipFile(archive) as opened:
            assert opened.testzip() is None
            assert len(opened.namelist()) == 1201


def test_submitting_outlasts_the_server(up: Up) -> None:
    """The server dies while the list is read, and is there again before it is sent."""

    def tasks() -> Iterator[Any]:
        for number in range(3000):
            if number == 1500:
                up.kill()
                again.start()
            yield {"n": number}

    again = threading.Thread(target=up.start)
    with Client(up.url, up.key) as client:
        client.health()
        job = client.submit(tasks(), handler="tests.echo").wait(timeout=2 * PATIENCE)
        again.join()
        assert (job.kind, job.succeeded) == ("python", 3000)
        assert [found.id for found in client.jobs()] == [job.id]
        result = next(job.results())
        assert json.loads(job.body(result)) == result.input


async def test_under_a_loop_that_runs_already(up: Up) -> None:
    """As in a notebook: the blocking client in a coroutine, beside the other one."""
    with Client(up.url, up.key) as client:
        job = client.submit([1, 2, 3], handler="tests.echo").wait(timeout=PATIENCE)
        assert job.ok
        assert {result.input for result in job.results()} == {1, 2, 3}
        assert [each.event for each in job.stream() if isinstance(each, Event)][-1] == "run.completed"
        async with AsyncClient(up.url, up.key) as beside:
            assert (await beside.job(job.id)).ok


def test_in_many_threads(up: Up) -> None:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with Client(up.url, up.key) as client:

        def use(number: int) -> None:
            job = client.submit([number] * 20, handler="tests.echo").wait(timeout=PATIENCE)
            found.put((number, [json.loads(client.job(job.id).body(result)) for result in job.results()]))

        threads = [threading.Thread(target=use, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(found.get_nowait() for _ in threads) == [(number, [number] * 20) for number in range(12)]


# As programs

PLAIN = """
from conveyor import Client
job = Client().submit(["a", "b"], handler="tests.echo").wait(progress=True)
print(job.ok, sorted(result.input for result in job.results()))
"""
AWAITED = """
import asyncio
from conveyor import AsyncClient
async def main():
    async with AsyncClient() as client:
        job = await client.submit(["a", "b"], handler="tests.echo")
        await job.wait(progress=True)
        print(job.ok, sorted([result.input async for result in job.results()]))
asyncio.run(main())
"""


@pytest.mark.parametrize("program", [PLAIN, AWAITED], ids=["plain", "awaited"])
def test_a_script_finds_the_server_of_this_machine_and_ends_well(up: Up, program: str) -> None:
    """Ten times: a thread that still works when the interpreter ends would abort one in ten."""
    env = environment(CONVEYOR_DATA=str(up.data))
    for _ in range(10):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], env=env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "True ['a', 'b']\n"), done.stderr
        assert done.stderr.endswith("completed, 2 of 2 done\n"), done.stderr
        assert "Exception ignored" not in done.stderr


def test_the_key_of_this_machine_goes_nowhere_else(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVEYOR_DATA", str(up.data))
    assert Client()._session.transport._key == up.key
    assert Client("http://localhost:1")._session.transport._key == up.key
    assert Client("https://conveyor.example.com")._session.transport._key is None
    monkeypatch.setenv("CONVEYOR_API_KEY", "cv_of_the_environment")
    monkeypatch.setenv("CONVEYOR_URL", "https://conveyor.example.com")
    made = Client()._session.transport
    assert (made.url, made._key) == ("https://conveyor.example.com", "cv_of_the_environment")


async def test_the_page_of_the_docs(
    up: Up, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every example of it, in order, as a notebook would run them."""
    monkeypatch.setenv("CONVEYOR_DATA", str(up.data))
    monkeypatch.chdir(tmp_path)
    lines = [f"{site}/{'missing' if number == 7 else 'quick'}/{number}" for number in range(20)]
    Path("urls.txt").write_text("".join(f"{line}\n" for line in lines))
    Path("more.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    page = (ROOT / "docs" / "sdk.md").read_text()
    # Nothing is to leave this machine.
    page = page.replace("https://example.com", f"{site}/quick")
    names: dict[str, Any] = {}
    for cell in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        code = compile(cell, "docs/sdk.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        made = types.FunctionType(code, names)()
        if made is not None:
            await made
    assert "19 of 20" in (told := capsys.readouterr().out)
    assert "not_found 404" in told
    for name in ("results.zip", "all.zip", "again.zip"):
        assert zipfile.ZipFile(name).testzip() is None
    [failed] = gzip.decompress(Path("failed.jsonl.gz").read_bytes()).splitlines()
    assert json.loads(failed)["http_status"] == 404


HANGING = """
import sys
from conveyor import Client
print("asks", flush=True)
Client(sys.argv[1], "key").health()
"""


def test_ctrl_c_is_heard_while_an_answer_is_awaited() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen(
            [sys.executable, "-c", HANGING, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            connection, _ = silent.accept()
            connection.recv(1000)
            process.send_signal(signal.SIGINT)
            # Without an answer it would wait for a minute, and then try again.
            _, told = process.communicate(timeout=PATIENCE)
            connection.close()
    assert "KeyboardInterrupt" in told
    assert process.returncode in (1, 130, -signal.SIGINT)


class Notebook:
    """A real kernel, as a notebook has it."""

    def __init__(self, manager: KernelManager) -> None:
        self._client = manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE)

    def run(self, code: str) -> list[dict[str, Any]]:
        """What a cell showed."""
        shown: list[dict[str, Any]] = []

        def keep(message: dict[str, Any]) -> None:
            if message["msg_type"] in ("display_data", "update_display_data", "execute_result", "stream"):
                shown.append({"type": message["msg_type"], **message["content"]})

        reply = self._client.execute_interactive(code, timeout=PATIENCE, output_hook=keep)
        assert reply["content"]["status"] == "ok", reply["content"]
        return shown

    def close(self) -> None:
        self._client.stop_channels()


@pytest.fixture
def notebook(up: Up) -> Iterator[Notebook]:
    manager = KernelManager()
    manager.start_kernel(env=environment(CONVEYOR_DATA=str(up.data)))
    made = Notebook(manager)
    try:
        yield made
    finally:
        made.close()
        manager.shutdown_kernel(now=True)


def test_in_a_notebook(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run("from conveyor import Client, AsyncClient\nclient = Client()")
    shown = notebook.run(
        "job = client.submit(range(30), handler='tests.echo', name='<b>mine</b>', concurrency=5)\n"
        "job.wait(progress=True);"
    )
    assert shown[0]["type"] == "display_data"
    assert {each["type"] for each in shown[1:]} == {"update_display_data"}, "one card, written over"
    assert "30 of 30 done" in shown[-1]["data"]["text/html"]
    [card] = notebook.run("job")
    assert "&lt;b&gt;mine&lt;/b&gt;" in card["data"]["text/html"]
    assert card["data"]["text/plain"].startswith("<Job job_")
    [printed] = notebook.run("print(sum(result.ok for result in job.results()))")
    assert printed["text"] == "30\n"
    [awaited] = notebook.run("await (await AsyncClient().job(job.id)).refresh()")
    assert "30 of 30 done" in awaited["data"]["text/html"]
    shown = notebook.run(
        "import tempfile, pathlib\njob.export(pathlib.Path(tempfile.mkdtemp(), 'o.zip'), progress=True);"
    )
    assert shown[0]["type"] == "display_data"
    assert "downloading" in shown[-1]["data"]["text/html"]
