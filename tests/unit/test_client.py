"""The client against small real servers: what it sends, what it makes of answers, and when it tries again."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conveyor import errors
from conveyor.client import Client
from conveyor.client.problems import BY_CODE, problem
from conveyor.client.transport import Transport


@dataclass
class Said:
    """An answer to give; without a status, the connection is cut."""

    status: int | None = 200
    body: bytes = b"{}"
    length: int | None = None


@dataclass
class Server:
    """Gives prepared answers, in order, and keeps what it was asked."""

    url: str = ""
    answers: list[Said] = field(default_factory=list)
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    told = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            told.asked.append((self.command, self.path, headers, body))
            said = told.answers.pop(0)
            self.close_connection = True
            if said.status is None:
                return
            self.send_response(said.status)
            self.send_header("Connection", "close")
            self.send_header("Content-Length", str(said.length if said.length is not None else len(said.body)))
            self.end_headers()
            self.wfile.write(said.body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{httpd.server_port}"
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield told
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, "cv_key") as made:
        made._transport.pause = lambda _: None
        yield made


def page(items: list[object], cursor: str | None) -> Said:
    return Said(body=json.dumps({"items": items, "next_cursor": cursor}).encode())


def test_submit_sends_the_key_and_its_idempotency_key(server: Server, client: Client) -> None:
    server.answers = [Said(201, b'{"id": "job_1"}')]
    assert client.submit({"tasks": ["https://example.com"]}, "once") == {"id": "job_1"}
    method, path, headers, body = server.asked[0]
    assert (method, path) == ("POST", "/v1/jobs")
    assert headers["authorization"] == "Bearer cv_key"
    assert headers["idempotency-key"] == "once"
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {"tasks": ["https://example.com"]}


def test_pages_are_followed_to_their_end(server: Server, client: Client) -> None:
    server.answers = [page([1, 2], "a b&c"), page([3], None)]
    assert list(client.results("job_1", 2, status="failed", error_code=None)) == [1, 2, 3]
    assert [path for _, path, _, _ in server.asked] == [
        "/v1/jobs/job_1/results?limit=2&status=failed",
        "/v1/jobs/job_1/results?limit=2&status=failed&cursor=a+b%26c",
    ]


def test_an_id_can_not_leave_its_place_in_the_path(server: Server, client: Client) -> None:
    server.answers = [Said()]
    client.job("../keys?x=1")
    assert server.asked[0][1] == "/v1/jobs/..%2Fkeys%3Fx%3D1"


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_every_error_comes_back_as_its_class(kind: type[errors.ConveyorError]) -> None:
    document = {"type": "t", "title": "T", "status": kind.status, "code": kind.code, "detail": "what", "field": "f"}
    error = problem(kind.status, json.dumps(document).encode())
    assert type(error) is kind
    assert error.message == "what"
    assert error.details == {"field": "f"}


def test_the_tree_is_whole() -> None:
    declared = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.ConveyorError)
    }
    assert set(BY_CODE.values()) == declared


def test_an_unknown_code_keeps_code_and_status() -> None:
    error = problem(418, b'{"code": "teapot", "detail": "short and stout"}')
    assert (error.code, error.status, error.message) == ("teapot", 418, "short and stout")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b""])
def test_an_answer_of_another_kind_of_server(body: bytes) -> None:
    error = problem(502, body)
    assert error.status == 502
    assert "CONVEYOR_URL" in error.message


def test_html_with_200_is_no_conveyor(server: Server, client: Client) -> None:
    server.answers = [Said(200, b"<html>hello</html>")]
    with pytest.raises(errors.ConveyorError, match="CONVEYOR_URL"):
        client.job("job_1")


def test_a_redirect_is_not_followed(server: Server, client: Client) -> None:
    server.answers = [Said(302)]
    with pytest.raises(errors.ConveyorError, match="302"):
        client.job("job_1")
    assert len(server.asked) == 1


def test_a_cut_get_is_tried_again(server: Server, client: Client) -> None:
    server.answers = [Said(None), Said(None), Said(200, b'{"id": "job_1"}')]
    assert client.job("job_1") == {"id": "job_1"}


def test_a_cut_submit_is_tried_again_under_the_same_key(server: Server, client: Client) -> None:
    server.answers = [Said(None), Said(201, b'{"id": "job_1"}')]
    client.submit({}, "once")
    assert [headers["idempotency-key"] for _, _, headers, _ in server.asked] == ["once", "once"]


def test_a_cut_post_without_an_idempotency_key_is_not(server: Server, client: Client) -> None:
    server.answers = [Said(None), Said(201)]
    with pytest.raises(errors.ServerUnreachable):
        client.create_key("acme")
    assert len(server.asked) == 1


def test_a_submit_that_is_still_carried_out_is_asked_again(server: Server, client: Client) -> None:
    server.answers = [Said(None), Said(409, b'{"code": "idempotency_key_in_flight"}'), Said(201, b'{"id": "job_1"}')]
    assert client.submit({}, "once") == {"id": "job_1"}


def promise(server: Server) -> Said:
    headers = {"X-Content-Sha256": "as announced"}
    place = {"upload_id": "upload_1", "url": f"{server.url}/there?signature=s", "method": "PUT", "headers": headers}
    return Said(201, json.dumps(place).encode())


@pytest.fixture
def urls(tmp_path: Path) -> Path:
    path = tmp_path / "urls.txt"
    path.write_bytes(b"https://example.com/\n" * 50_000)
    return path


def test_an_upload(server: Server, client: Client, urls: Path) -> None:
    server.answers = [promise(server), Said(204, b"")]
    seen: list[tuple[int, int]] = []
    assert client.upload(urls, "once", lambda sent, total: seen.append((sent, total))) == "upload_1"
    asked, put = server.asked
    data = urls.read_bytes()
    assert asked[:2] == ("POST", "/v1/uploads")
    assert json.loads(asked[3]) == {"size": len(data), "sha256": sha256(data).hexdigest()}
    assert asked[2]["idempotency-key"] == "once"
    assert put[:2] == ("PUT", "/there?signature=s")
    assert put[3] == data
    assert put[2]["content-length"] == str(len(data))
    assert put[2]["x-content-sha256"] == "as announced"
    assert "authorization" not in put[2], "the link may lead to another server"
    assert seen == sorted(seen)
    assert seen[-1] == (len(data), len(data))


def test_a_cut_upload_is_sent_again_from_its_start(server: Server, client: Client, urls: Path) -> None:
    server.answers = [promise(server), Said(None), Said(204, b"")]
    client.upload(urls, "once")
    assert server.asked[2][3] == urls.read_bytes()


@pytest.mark.parametrize("stored", [True, False])
def test_an_upload_that_was_stored_already(server: Server, client: Client, urls: Path, stored: bool) -> None:
    conflict = Said(409, b'{"code": "upload_conflict"}')
    server.answers = [promise(server), Said(None), conflict, Said(200, json.dumps({"stored": stored}).encode())]
    if stored:
        assert client.upload(urls, "once") == "upload_1"
    else:
        with pytest.raises(errors.UploadConflict):
            client.upload(urls, "once")
    assert server.asked[-1][:2] == ("GET", "/v1/uploads/upload_1")


def test_a_file_that_shrinks_while_it_is_sent(server: Server, client: Client, urls: Path) -> None:
    server.answers = [promise(server)]

    def shrink(sent: int, total: int) -> None:
        urls.write_bytes(b"gone")

    with pytest.raises(errors.ListUnreadable, match="shorter"):
        client.upload(urls, "once", shrink)


def test_what_can_be_done_with_jobs_and_letters(server: Server, client: Client) -> None:
    moves = [Said(202), Said(202), Said(), Said(), Said(), Said()]
    server.answers = [page([{"line": 2}], None), *moves, Said(204, b""), page([{"id": "1"}], None)]
    assert list(client.invalid("job_1")) == [{"line": 2}]
    client.rerun("job_1")
    client.rerun("job_1", {"tag": "x"}, {"attempts": 2}, "once")
    client.cancel("job_1")
    client.pause("job_1")
    client.resume("job_1")
    client.change("job_1", {"rate_per_host": None})
    client.delete("job_1")
    assert list(client.dead_letters()) == [{"id": "1"}]
    assert [json.loads(body) for method, _, _, body in server.asked if body and method != "GET"] == [
        {"select": "failed", "options": {}},
        {"select": {"tag": "x"}, "options": {"attempts": 2}},
        {"rate_per_host": None},
    ]
    assert [(method, path) for method, path, _, _ in server.asked] == [
        ("GET", "/v1/jobs/job_1/invalid?limit=500"),
        ("POST", "/v1/jobs/job_1/rerun"),
        ("POST", "/v1/jobs/job_1/rerun"),
        ("POST", "/v1/jobs/job_1/cancel"),
        ("POST", "/v1/jobs/job_1/pause"),
        ("POST", "/v1/jobs/job_1/resume"),
        ("PATCH", "/v1/jobs/job_1"),
        ("DELETE", "/v1/jobs/job_1"),
        ("GET", "/v1/dead-letters?limit=500"),
    ]


def test_letters_are_redriven_in_parts(server: Server, client: Client) -> None:
    server.answers = [Said(200, b'{"redriven": 990, "skipped": 10}'), Said(200, b'{"redriven": 1, "skipped": 0}')]
    assert client.redrive([str(number) for number in range(1001)]) == {"redriven": 991, "skipped": 10}
    assert [len(json.loads(body)["ids"]) for _, _, _, body in server.asked] == [1000, 1]


def test_an_error_is_not_tried_again(server: Server, client: Client) -> None:
    server.answers = [Said(404, b'{"code": "not_found"}'), Said()]
    with pytest.raises(errors.NotFound):
        client.job("job_1")
    assert len(server.asked) == 1


def test_nobody_listens() -> None:
    pauses: list[float] = []
    transport = Transport("http://127.0.0.1:9", None, pauses.append)
    with pytest.raises(errors.ServerUnreachable, match="conveyor up"):
        transport.send("GET", "/healthz")
    transport.close()
    assert len(pauses) == 3


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://x", "http://", "nonsense"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(errors.InvalidSetting, match="CONVEYOR_URL"):
        Client(url)


def test_a_key_that_can_not_be_a_header() -> None:
    with Client("http://127.0.0.1:9", "with\nnewline") as client, pytest.raises(errors.InvalidSetting):
        client.job("job_1")


def test_an_archive_is_whole_or_not_there(server: Server, client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    server.answers = [Said(200, b"x" * 100_000)]
    sizes: list[int] = []
    assert client.archive("job_1", out, sizes.append) == 100_000
    assert out.read_bytes() == b"x" * 100_000
    assert sizes[-1] == 100_000

    server.answers = [Said(200, b"short", length=100)]
    with pytest.raises(errors.ServerUnreachable):
        client.archive("job_1", out)
    assert out.read_bytes() == b"x" * 100_000
    assert [path.name for path in tmp_path.iterdir()] == ["out.zip"]


def test_an_archive_that_is_refused(server: Server, client: Client, tmp_path: Path) -> None:
    server.answers = [Said(404, b'{"code": "not_found", "detail": "no such job"}')]
    with pytest.raises(errors.NotFound, match="no such job"):
        client.archive("job_1", tmp_path / "out.zip")
    assert not list(tmp_path.iterdir())


# Longer than what a client reads ahead.
DATA = bytes(range(256)) * 2000


def ready(url: str = "/v1/exports/export_1/parts/1", data: bytes = DATA) -> Said:
    part = {"number": 1, "size": len(data), "sha256": sha256(data).hexdigest(), "url": url}
    return Said(body=json.dumps({"id": "export_1", "state": "ready", "parts": [part]}).encode())


def waiting(state: str = "running") -> Said:
    error = {"code": "engine_failed", "message": "A stored body is missing."}
    return Said(body=json.dumps({"id": "export_1", "state": state, "error": error, "parts": []}).encode())


def test_an_export_is_asked_for_awaited_and_downloaded(server: Server, client: Client, tmp_path: Path) -> None:
    server.answers = [Said(202, b'{"id": "export_1"}'), waiting("queued"), waiting(), ready(), ready(), Said(200, DATA)]
    assert client.export("job_1", tmp_path / "out.zip", {"format": "zip"}) == [tmp_path / "out.zip"]
    assert (tmp_path / "out.zip").read_bytes() == DATA
    method, path, headers, body = server.asked[0]
    assert (method, path, json.loads(body)) == ("POST", "/v1/jobs/job_1/exports", {"format": "zip"})
    assert headers["idempotency-key"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.zip"]


def test_an_export_that_failed(server: Server, client: Client, tmp_path: Path) -> None:
    server.answers = [Said(202, b'{"id": "export_1"}'), waiting("failed")]
    with pytest.raises(errors.ExportFailed, match="A stored body is missing"):
        client.export("job_1", tmp_path / "out.zip")
    assert not list(tmp_path.iterdir())


def test_a_download_goes_on_where_it_broke(server: Server, client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    server.answers = [
        ready(),
        Said(200, DATA[:200_000], length=len(DATA)),
        Said(206, DATA[200_000:400_000], length=len(DATA) - 200_000),
        Said(206, DATA[400_000:]),
    ]
    assert client.download_part("export_1", 1, out) == len(DATA)
    assert out.read_bytes() == DATA
    ranges = [headers.get("range") for _, _, headers, _ in server.asked]
    assert ranges == [None, None, "bytes=200000-", "bytes=400000-"]
    assert server.asked[1][2]["accept-encoding"] == "identity"
    assert server.asked[2][2]["if-range"] == f'"{sha256(DATA).hexdigest()}"'


def test_another_command_goes_on_with_it_too(server: Server, client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    (tmp_path / f"out.zip.{sha256(DATA).hexdigest()[:12]}.part").write_bytes(DATA[:7000])
    (tmp_path / "out.zip.0123456789ab.part").write_bytes(b"of another export")
    server.answers = [ready(), Said(206, DATA[7000:])]
    assert client.download_part("export_1", 1, out) == len(DATA)
    assert out.read_bytes() == DATA
    assert server.asked[1][2]["range"] == "bytes=7000-"


def test_a_server_without_ranges_is_asked_for_all(server: Server, client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    server.answers = [ready(), Said(200, DATA[:200_000], length=len(DATA)), Said(200, DATA)]
    assert client.download_part("export_1", 1, out) == len(DATA)
    assert out.read_bytes() == DATA


def test_a_download_that_is_something_else(server: Server, client: Client, tmp_path: Path) -> None:
    out = tmp_path / "out.zip"
    out.write_bytes(b"of yesterday")
    server.answers = [ready(), Said(200, DATA[:-1] + b"!")]
    with pytest.raises(errors.ConveyorError, match="sha256"):
        client.download_part("export_1", 1, out)
    assert out.read_bytes() == b"of yesterday"
    assert [path.name for path in tmp_path.iterdir()] == ["out.zip"]


def test_a_download_that_never_gets_on(server: Server, client: Client, tmp_path: Path) -> None:
    server.answers = [ready(), *[Said(206, b"", length=100)] * 30]
    with pytest.raises(errors.ServerUnreachable):
        client.download_part("export_1", 1, tmp_path / "out.zip")
    assert len(server.asked) < 30


def test_a_link_to_elsewhere_gets_no_key(server: Server, client: Client, tmp_path: Path) -> None:
    """And is asked for anew when it has lapsed."""
    links = [f"{server.url}/store/old", f"{server.url}/store/new"]
    lapsed = Said(403, b"<Error><Code>AccessDenied</Code></Error>")
    server.answers = [ready(links[0]), Said(200, DATA[:200_000], length=len(DATA)), lapsed, ready(links[1])]
    server.answers += [Said(206, DATA[200_000:])]
    assert client.download_part("export_1", 1, tmp_path / "out.zip") == len(DATA)
    for _, path, headers, _ in server.asked:
        assert ("authorization" in headers) is path.startswith("/v1")
    assert server.asked[-1][1] == "/store/new"
    assert "if-range" not in server.asked[-1][2]


def test_an_empty_part(server: Server, client: Client, tmp_path: Path) -> None:
    server.answers = [ready(data=b""), Said(200, b"")]
    assert client.download_part("export_1", 1, tmp_path / "out.jsonl") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_body_to_a_stream(server: Server, client: Client, tmp_path: Path) -> None:
    server.answers = [Said(200, b"page")]
    with (tmp_path / "page").open("wb") as file:
        assert client.body("job_1", "task_1", file) == 4
    assert (tmp_path / "page").read_bytes() == b"page"
