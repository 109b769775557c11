"""What was opened with a key or a session ends with it."""

import asyncio

from tests.security.test_wire import SPEC, head
from tests.support.api import Api, new_key, new_server
from tests.support.clocks import JumpingClock, ManualClock

PROOF = {"x-conveyor-dashboard": "1"}


async def opened(api: Api, path: str, credential: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that has shown something."""
    reader, writer = await asyncio.open_connection(*api.address)
    writer.write(head(path, credential, "connection: close", method="GET", host=api.url.removeprefix("http://")))
    received = b""
    async with asyncio.timeout(30):
        while b"data:" not in received:
            piece = await reader.read(65536)
            assert piece, received
            received += piece
    return reader, writer


async def ends_soon(clock: JumpingClock, reader: asyncio.StreamReader) -> bool:
    """Whether the stream ends; while it does not, it says now and then that it is there."""
    async with asyncio.timeout(30):
        for _ in range(10):
            clock.advance(16)
            if not await reader.read(65536):
                return True
    return False


async def streams_end_with_their_key_or_session() -> None:
    clock = JumpingClock()
    async with new_server(clock) as api:
        job_id = (await api.submit(SPEC)).json["id"]
        signed_in = await api.post("/v1/sign-in", {"key": api.key}, auth=False, headers=PROOF)
        cookie = signed_in.headers["set-cookie"].partition(";")[0]
        paths = ("/v1/stream", f"/v1/jobs/{job_id}/stream")
        by_session = [await opened(api, path, f"cookie: {cookie}") for path in paths]
        by_key = [await opened(api, path, f"authorization: Bearer {api.key}") for path in paths]
        streams = [reader for reader, _ in by_session + by_key]
        ended = await api.request("DELETE", "/v1/session", auth=False, headers={**PROOF, "cookie": cookie})
        assert ended.status == 204
        ends = [await ends_soon(clock, reader) for reader in streams[:2]]
        await api.system.records.access.revoke_key(api.key.split("_")[1], clock.now())
        ends += [await ends_soon(clock, reader) for reader in streams[2:]]
        for _, writer in by_session + by_key:
            writer.close()
        assert ends == [True] * 4


async def test_streams_end_with_their_key_or_session() -> None:
    await streams_end_with_their_key_or_session()


async def invalid_keys_have_a_limit() -> None:
    clock = ManualClock()
    async with new_server(clock, failed_keys_per_minute=3) as api:
        reads: list[str] = []
        stored = api.system.records.access.key

        async def counted(key_id: str) -> object:
            reads.append(key_id)
            return await stored(key_id)

        known, other = api.key, await new_key(api.system, "other")
        assert (await api.get("/v1/jobs")).status == 200
        api.system.records.access.key = counted  # type: ignore[method-assign]  # counts what reaches the store
        statuses = []
        for number in range(10):
            api.key = f"cv_{number:026}_{'0' * 64}"
            statuses.append((await api.get("/v1/jobs")).status)
        assert statuses == [401] * 3 + [429] * 7
        assert len(reads) == 3
        for path in ("/metrics", "/v1/session"):
            refused = await api.get(path)
            assert (refused.status, refused.json["code"]) == (429, "too_many_failed_keys")
            assert int(refused.headers["retry-after"]) >= 1
        for body in ({"key": other}, {"link": "guessed"}):
            assert (await api.post("/v1/sign-in", body, auth=False, headers=PROOF)).status == 429
        api.key = known
        assert (await api.get("/v1/jobs")).status == 200
        api.key = other
        clock.advance(61)
        assert (await api.get("/v1/jobs")).status == 200


async def test_invalid_keys_have_a_limit() -> None:
    await invalid_keys_have_a_limit()
