"""Who gets into the dashboard, and who does not: links, keys, cookies, and requests that other sites make a browser
send. And what the browser is told to hold to."""

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest

from conveyor import faults
from conveyor.auth.keys import parse_key
from conveyor.auth.sessions import LINK, OWNER, SESSION, Sessions
from conveyor.cli import dashboard_command
from conveyor.cli.dashboard_command import sign_in_path
from tests.support.api import Answer, Api, new_key, new_server
from tests.support.clocks import JumpingClock

PROOF = {"x-conveyor-dashboard": "1"}


async def sign_in(api: Api, body: dict[str, str], **headers: str) -> Answer:
    return await api.post("/v1/sign-in", body, auth=False, headers={**PROOF, **headers})


async def link(api: Api) -> str:
    made = await api.post("/v1/sign-in/links")
    assert made.status == 201, made.body
    path: str = made.json["path"]
    assert path.startswith("/#/sign-in/")
    return path.rpartition("/")[2]


def cookie(answer: Answer) -> str:
    assert answer.status == 204, answer.body
    return answer.headers["set-cookie"].partition(";")[0]


async def visit(api: Api, session: str, method: str = "GET", path: str = "/v1/session", **headers: str) -> Answer:
    body = b"{}" if method == "POST" else None
    return await api.request(method, path, body=body, auth=False, headers={"cookie": session, **headers})


def refused(answer: Answer, status: int, code: str) -> bool:
    return (answer.status, answer.json["code"]) == (status, code)


async def test_a_link_is_good_once(server: Api) -> None:
    given = await link(server)
    answer = await sign_in(server, {"link": given})
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert name.startswith(f"conveyor_session_{server.address[1]}=")
    assert {each.lower() for each in attributes} >= {"httponly", "samesite=strict", "path=/"}
    assert "Secure" not in attributes
    shown = await visit(server, cookie(answer))
    assert (shown.status, shown.json["tenant"]) == (200, "acme")
    assert refused(await sign_in(server, {"link": given}), 401, "link_refused")
    assert refused(await sign_in(server, {"link": "nonsense"}), 401, "link_refused")
    assert (await visit(server, cookie(answer))).status == 200


async def test_neither_links_nor_sessions_last_for_ever(server: Api, clock: JumpingClock) -> None:
    late = await link(server)
    session = cookie(await sign_in(server, {"key": server.key}))
    clock.advance(server.system.settings.sign_in_link_seconds + 1)
    assert refused(await sign_in(server, {"link": late}), 401, "link_refused")
    assert (await visit(server, session)).status == 200
    clock.advance(server.system.settings.session_seconds)
    assert refused(await visit(server, session), 401, "session_ended")


async def test_a_session_ends_with_its_key_and_by_signing_out(server: Api, clock: JumpingClock) -> None:
    other = await new_key(server.system, "acme")
    first, second = cookie(await sign_in(server, {"key": server.key})), cookie(await sign_in(server, {"key": other}))
    out = await visit(server, first, "DELETE", **PROOF)
    assert (out.status, "Max-Age=0" in out.headers["set-cookie"]) == (204, True)
    await server.system.records.access.revoke_key(parse_key(other).key_id, clock.now())
    clock.advance(3)
    assert refused(await visit(server, first), 401, "session_ended")
    assert refused(await visit(server, second), 401, "session_ended")
    assert refused(await sign_in(server, {"key": other}), 401, "invalid_key")
    assert refused(await sign_in(server, {"key": other, "link": "x"}), 400, "invalid_field")
    assert refused(await sign_in(server, {}), 400, "invalid_field")


async def test_sessions_outlive_the_process_and_can_not_be_read_from_the_rows(server: Api) -> None:
    session = cookie(await sign_in(server, {"key": server.key}))
    token = session.partition("=")[2]
    again = Sessions(server.system.records, server.system.clock, server.system.settings)
    assert (await again.authenticate(token)).tenant == "acme"
    for kind in (SESSION, LINK):
        rows = (await server.system.records.documents.documents(kind, OWNER, None, 10)).items
        assert not any(token in row.id or token.encode() in row.body for row in rows)


async def test_a_session_is_no_administrator(server: Api) -> None:
    boss = await server.as_tenant("acme", admin=True)
    session = cookie(await sign_in(server, {"link": await link(boss)}))
    assert (await boss.get("/v1/keys")).status == 200
    assert refused(await visit(server, session, path="/v1/keys"), 403, "forbidden")
    assert refused(await visit(server, session, "POST", "/v1/sign-in/links", **PROOF), 403, "forbidden")


async def become_admin(api: Api, session: str, key: str) -> Answer:
    body = json.dumps({"key": key}).encode()
    return await api.request("POST", "/v1/session/admin", body=body, auth=False, headers={"cookie": session, **PROOF})


async def test_a_session_is_an_administrator_for_a_quarter_of_an_hour(server: Api, clock: JumpingClock) -> None:
    boss = await new_key(server.system, "acme", admin=True)
    session = cookie(await sign_in(server, {"key": server.key}))
    assert (await visit(server, session)).json["admin_until"] is None
    became = await become_admin(server, session, boss)
    assert became.status == 200
    assert (await visit(server, session)).json["admin_until"] == became.json["admin_until"]
    assert (await visit(server, session, path="/v1/keys")).status == 200
    # It still acts for its own tenant, and makes no links that outlive it.
    assert (await visit(server, session)).json["key_id"] == parse_key(server.key).key_id
    assert refused(await visit(server, session, "POST", "/v1/sign-in/links", **PROOF), 403, "forbidden")
    clock.advance(901)
    assert refused(await visit(server, session, path="/v1/keys"), 403, "forbidden")
    assert (await visit(server, session)).json["admin_until"] is None


async def test_a_session_is_no_administrator_any_more_once_it_leaves_or_the_key_goes(
    server: Api, clock: JumpingClock
) -> None:
    boss, other = [await new_key(server.system, "acme", admin=True) for _ in range(2)]
    session = cookie(await sign_in(server, {"key": server.key}))
    await become_admin(server, session, boss)
    assert (await visit(server, session, "DELETE", "/v1/session/admin", **PROOF)).status == 204
    assert refused(await visit(server, session, path="/v1/keys"), 403, "forbidden")
    await become_admin(server, session, other)
    await server.system.records.access.revoke_key(parse_key(other).key_id, clock.now())
    clock.advance(3)
    assert refused(await visit(server, session, path="/v1/keys"), 403, "forbidden")
    assert (await visit(server, session)).status == 200


async def test_only_an_administrators_key_makes_a_session_one(server: Api) -> None:
    session = cookie(await sign_in(server, {"key": server.key}))
    for key in (server.key, "cv_nonsense"):
        assert refused(await become_admin(server, session, key), 403, "forbidden")
    assert refused(await server.post("/v1/session/admin", {"key": server.key}), 403, "forbidden")
    assert refused(await visit(server, session, path="/v1/keys"), 403, "forbidden")


async def test_a_change_of_rights_that_is_cut_off_has_happened_or_not(server: Api, clock: JumpingClock) -> None:
    boss = await new_key(server.system, "acme", admin=True)
    for point, status in (("session.admin.before", 403), ("session.admin.after", 200)):
        session = cookie(await sign_in(server, {"key": server.key}))

        def cut(passed: str, point: str = point) -> None:
            if passed == point:
                raise RuntimeError(point)

        faults.arm(cut)
        try:
            assert (await become_admin(server, session, boss)).status == 500
        finally:
            faults.arm(None)
        # The rights of a session are cached for two seconds.
        clock.advance(3)
        assert (await visit(server, session, path="/v1/keys")).status == status


ELSEWHERE: list[dict[str, str]] = [
    {},
    {**PROOF, "sec-fetch-site": "cross-site"},
    {**PROOF, "sec-fetch-site": "same-site"},
    {**PROOF, "sec-fetch-site": "none"},
    {**PROOF, "origin": "http://evil.example"},
    # Another port of the same host is the same site, and not the same origin.
    {**PROOF, "origin": "http://127.0.0.1:1"},
    {**PROOF, "origin": "null"},
]


async def test_other_sites_change_nothing(server: Api) -> None:
    session = cookie(await sign_in(server, {"key": server.key}))
    made = await server.submit({"tasks": ["http://example.com/"]})
    path = f"/v1/jobs/{made.json['id']}/cancel"
    for headers in ELSEWHERE:
        assert refused(await visit(server, session, "POST", path, **headers), 403, "cross_site"), headers
        answer = await server.post("/v1/sign-in", {"key": server.key}, auth=False, headers=headers)
        assert refused(answer, 403, "cross_site"), headers
    assert (await server.get(f"/v1/jobs/{made.json['id']}")).json["state"] == "running"
    own = {**PROOF, "sec-fetch-site": "same-origin", "origin": server.url}
    assert (await visit(server, session, "POST", path, **own)).status == 200


async def test_reads_are_for_pages_of_ours(server: Api) -> None:
    session = cookie(await sign_in(server, {"key": server.key}))
    assert refused(await visit(server, session, **{"sec-fetch-site": "same-site"}), 403, "cross_site")
    assert (await visit(server, session, **{"sec-fetch-site": "none"})).status == 200
    # A key needs no proof: no browser sends it by itself.
    assert (await server.post("/v1/dead-letters/redrive", {"ids": ["x"]})).status == 200


async def test_a_cookie_is_secure_where_the_page_came_by_tls(server: Api) -> None:
    host = server.url.removeprefix("http://")
    answer = await sign_in(server, {"key": server.key}, origin=f"https://{host}")
    assert "Secure" in answer.headers["set-cookie"].split("; ")


async def test_a_link_that_was_cut_off_is_spent(server: Api) -> None:
    given = await link(server)

    class Cut(Exception):
        pass

    def cut(point: str) -> None:
        if point == "session.redeem.between":
            raise Cut

    faults.arm(cut)
    try:
        assert (await sign_in(server, {"link": given})).status == 500
    finally:
        faults.arm(None)
    assert refused(await sign_in(server, {"link": given}), 401, "link_refused")


async def test_a_server_that_starts_prints_a_link_for_a_key_that_works(server: Api) -> None:
    path = await sign_in_path(server.system, server.key)
    assert (await sign_in(server, {"link": path.rpartition("/")[2]})).status == 204
    for none in (None, "", "cv_nonsense"):
        assert await sign_in_path(server.system, none) == "/"


async def a_log_signs_nobody_in() -> None:
    async with new_server() as server:
        with redirect_stdout(StringIO()):
            said = await dashboard_command.dashboard_link(server.system, server.key)
        assert "conveyor dashboard" in said
        assert "sign-in/" not in said


async def test_a_server_that_starts_signs_nobody_in_by_its_log() -> None:
    await a_log_signs_nobody_in()


async def test_a_server_that_starts_on_a_terminal_prints_a_link(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    said = await dashboard_command.dashboard_link(server.system, server.key)
    assert said.startswith("/#/sign-in/")


async def test_the_files_carry_what_a_browser_is_to_hold_to(server: Api) -> None:
    page = await server.get("/", auth=False)
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy | {"require-trusted-types-for": "", "trusted-types": ""} == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'self'",
        "require-trusted-types-for": "",
        "trusted-types": "",
    }
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    named = re.findall(r'(?:href|src)="(/[^"]+)"', page.body.decode())
    assert len(named) >= 5
    for path in named:
        file = await server.get(path, auth=False)
        assert file.status == 200, path
        assert (await server.get(path, auth=False, headers={"if-none-match": file.headers["etag"]})).status == 304
        assert (await server.request("HEAD", path, auth=False)).body == b""
    for path in ("/dashboard/", "/dashboard/../keys.py", "/dashboard/%2e%2e/keys.py", "/dashboard/index.html", "/x"):
        assert (await server.get(path, auth=False)).status == 404
    assert (await server.post("/", {}, auth=False)).status in {404, 405}


async def test_nothing_in_the_files_is_inline_or_elsewhere(server: Api) -> None:
    from conveyor.dashboard.static_files import Files

    for path, file in Files(server.system.blobs)._files.items():
        text = file.body.decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg|example\.)", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        if path == "/":
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", text)
