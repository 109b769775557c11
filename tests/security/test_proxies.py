"""What a proxy says about a request counts if the proxy is trusted."""

import json

import pytest

from conveyor.errors import InvalidSetting
from conveyor.settings import Settings
from tests.security.test_wire import answers, head
from tests.support.api import Answer, Api, new_server, parsed, raw
from tests.support.clocks import ManualClock

PUBLIC = ("x-forwarded-proto: https", "x-forwarded-host: jobs.example.com", "x-forwarded-for: 203.0.113.7")
UPLOAD = json.dumps({"size": 7, "sha256": "0" * 64}).encode()


async def sent(api: Api, path: str, body: bytes, *headers: str) -> Answer:
    length = f"content-length: {len(body)}"
    return parsed(await raw(api.address, head(path, length, "connection: close", *headers) + body))


async def link(api: Api, *headers: str) -> str:
    answer = await sent(api, "/v1/uploads", UPLOAD, f"authorization: Bearer {api.key}", *headers)
    assert answer.status == 201, answer.body
    url: str = answer.json["url"]
    return url.partition("/v1/")[0]


async def cookie(api: Api, *headers: str) -> str:
    body = json.dumps({"key": api.key}).encode()
    return (await sent(api, "/v1/sign-in", body, "x-conveyor-dashboard: 1", *headers)).headers["set-cookie"]


async def test_a_trusted_proxy_is_believed() -> None:
    async with new_server(trusted_proxies="10.0.0.0/8 127.0.0.1", allowed_hosts="jobs.example.com") as api:
        assert await link(api, *PUBLIC) == "https://jobs.example.com"
        assert "secure" in (await cookie(api, *PUBLIC)).lower()
        assert (await cookie(api, *PUBLIC)).startswith("conveyor_session=")
        # The nearest proxy is the one that is trusted.
        assert await link(api, "x-forwarded-proto: http, https", "x-forwarded-host: evil.example, localhost") == (
            "https://localhost"
        )
        assert await link(api, "x-forwarded-proto: gopher") == "http://localhost"
        refused = await sent(api, "/v1/uploads", UPLOAD, "x-forwarded-host: evil.example")
        assert (refused.status, refused.json["code"]) == (421, "host_refused")
        refused = await sent(api, "/v1/uploads", UPLOAD, "x-forwarded-host: a b")
        assert (refused.status, refused.json["code"]) == (400, "malformed_http")


async def other_peers_are_not_believed() -> None:
    for proxies in (None, "10.0.0.0/8 ::1"):
        async with new_server(trusted_proxies=proxies) as api:
            assert await link(api, *PUBLIC) == "http://localhost"
            assert "secure" not in (await cookie(api, *PUBLIC)).lower()


async def test_other_peers_are_not_believed() -> None:
    await other_peers_are_not_believed()


async def test_invalid_keys_are_counted_for_the_client_of_the_proxy() -> None:
    wrong = f"authorization: Bearer cv_{'0' * 26}_{'0' * 64}"
    async with new_server(ManualClock(), trusted_proxies="127.0.0.0/8 10.0.0.0/8", failed_keys_per_minute=1) as api:

        async def status(*addresses: str) -> list[int]:
            forwarded = [f"x-forwarded-for: {address}" for address in addresses]
            return answers(
                await raw(api.address, head("/v1/jobs", wrong, "connection: close", *forwarded, method="GET"))
            )

        assert await status("203.0.113.7") == [401]
        assert await status("203.0.113.7") == [429]
        # What the client itself wrote stands before what proxies add.
        assert await status("198.51.100.1, 203.0.113.7, 10.0.0.9") == [429]
        assert await status("198.51.100.1", "203.0.113.7") == [429]
        assert await status("203.0.113.8") == [401]
        assert await status("nonsense, 10.0.0.1") == [401]


@pytest.mark.parametrize("text", ["proxy.example", "10.0.0.0/99", "10.0.0.1/8"])
def test_what_is_no_network(text: str) -> None:
    with pytest.raises(InvalidSetting, match="TRUSTED_PROXIES"):
        Settings.load({}, trusted_proxies=text)
