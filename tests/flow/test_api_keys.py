"""Keys over HTTP: an administrator makes, lists and revokes them; a secret is shown once."""

import asyncio
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.api.schemas.key_shapes import KeyShape, NewKeyShape, TenantShape
from conveyor.auth.keys import is_usable, revoke
from conveyor.engines.records import AccessRecords
from conveyor.errors import LastAdminKey
from conveyor.model import ApiKey, TenantId
from tests.support.api import Api, new_server
from tests.support.clocks import JumpingClock
from tests.support.working import all_items


class Crashed(BaseException):
    """The process died here."""


@pytest.fixture
async def admin(server: Api) -> Api:
    return await server.as_tenant("local", admin=True)


async def test_a_key_is_made_used_and_revoked(admin: Api, clock: JumpingClock) -> None:
    made = await admin.post("/v1/keys", {"tenant": "newcomer", "name": "for CI"})
    assert made.status == 201
    msgspec.convert(made.json, NewKeyShape)
    assert made.json["tenant"] == "newcomer"
    user = Api(admin.url, admin.system, made.json["key"], admin._client)
    assert (await user.submit({"tasks": ["http://example.com/"]})).status == 201
    assert (await user.get("/v1/keys")).status == 403
    [item] = (await admin.get("/v1/keys?tenant=newcomer")).json["items"]
    msgspec.convert(item, KeyShape)
    assert (item["key_id"], item["name"], item["admin"], item["revoked_at"]) == (
        made.json["key_id"],
        "for CI",
        False,
        None,
    )
    secret = made.json["key"].rpartition("_")[2]
    for path in ("/v1/keys", "/v1/keys?tenant=newcomer"):
        assert secret.encode() not in (await admin.get(path)).body
    assert (await admin.request("DELETE", f"/v1/keys/{made.json['key_id']}")).status == 204
    clock.advance(2)
    assert (await user.get("/v1/jobs")).status == 401
    [item] = (await admin.get("/v1/keys?tenant=newcomer")).json["items"]
    assert item["revoked_at"] is not None
    assert (await admin.request("DELETE", f"/v1/keys/{made.json['key_id']}")).status == 204


async def test_tenants_are_those_of_the_keys(admin: Api, clock: JumpingClock) -> None:
    made = [(await admin.post("/v1/keys", {"tenant": tenant})).json for tenant in ("second", "first", "second")]
    assert (await admin.request("DELETE", f"/v1/keys/{made[0]['key_id']}")).status == 204
    for limit in (1, 2, 100):
        items = await all_items(admin, "/v1/tenants", limit)
        for item in items:
            msgspec.convert(item, TenantShape)
        found = {item["tenant"]: (item["active_keys"], item["keys"]) for item in items}
        assert list(found) == sorted(found)
        assert (found["first"], found["second"]) == ((1, 1), (1, 2))
        assert set(found) == {"acme", "local", "first", "second"}
    user = Api(admin.url, admin.system, made[1]["key"], admin._client)
    assert (await user.get("/v1/tenants")).status == 403
    assert (await admin.get("/v1/tenants?cursor=%20")).json["code"] == "bad_cursor"


async def test_keys_in_pages(admin: Api, clock: JumpingClock) -> None:
    for number in range(7):
        clock.advance(1)
        await admin.post("/v1/keys", {"tenant": f"t{number % 2}"})
    for path, count in (("/v1/keys", 9), ("/v1/keys?tenant=t0", 4), ("/v1/keys?tenant=nobody", 0)):
        for limit in (1, 3, 100):
            items = await all_items(admin, path, limit)
            assert len({item["key_id"] for item in items}) == len(items) == count
            assert [item["created_at"] for item in items] == sorted(item["created_at"] for item in items)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, ""),
        ({"tenant": "Not Valid"}, "tenant"),
        ({"tenant": "../x"}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "x", "name": ""}, "name"),
        ({"tenant": "x", "name": "a\nb"}, "name"),
        ({"tenant": "x", "admin": True}, "admin"),
        ({"tenant": "x", "secret": "y"}, "secret"),
    ],
    ids=str,
)
async def test_what_is_not_taken(admin: Api, body: dict[str, Any], field: str) -> None:
    answer = await admin.post("/v1/keys", body)
    assert (answer.status, answer.json["field"]) == (400, field)
    assert len((await admin.get("/v1/keys")).json["items"]) == 2


async def test_unknown_keys_and_bad_queries(admin: Api) -> None:
    for key_id in ("nonsense", "0" * 26, "A" * 26):
        answer = await admin.request("DELETE", f"/v1/keys/{key_id}")
        assert (answer.status, answer.json["code"]) == (404, "not_found")
    for query, code in (
        ("tenant=Not%20Valid", "invalid_field"),
        ("cursor=x", "bad_cursor"),
        ("limit=0", "invalid_field"),
        ("secret=x", "unknown_field"),
    ):
        answer = await admin.get(f"/v1/keys?{query}")
        assert (answer.status, answer.json["code"]) == (400, code)


async def the_last_administrator_stays() -> None:
    clock = JumpingClock()
    async with new_server(clock) as api:
        first, second = await api.as_tenant("boss", admin=True), await api.as_tenant("boss", admin=True)
        assert (await first.request("DELETE", f"/v1/keys/{first.key.split('_')[1]}")).status == 204
        last = await second.request("DELETE", f"/v1/keys/{second.key.split('_')[1]}")
        assert last.status == 409
        assert last.json["code"] == "last_admin_key"
        clock.advance(3)
        assert (await second.get("/v1/keys")).status == 200
        assert (await second.request("DELETE", f"/v1/keys/{first.key.split('_')[1]}")).status == 204


async def test_the_last_administrator_stays() -> None:
    await the_last_administrator_stays()


async def test_an_administrator_who_was_revoked_is_none(admin: Api, clock: JumpingClock) -> None:
    own = admin.key.split("_")[1]
    await admin.as_tenant("other", admin=True)
    assert (await admin.request("DELETE", f"/v1/keys/{own}")).status == 204
    clock.advance(2)
    assert (await admin.get("/v1/keys")).status == 401


class Together:
    """Keys, as two administrators read them at the same time."""

    def __init__(self, access: AccessRecords) -> None:
        self._access = access
        self._both = asyncio.Event()
        self._readers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._access, name)

    async def keys(self, tenant: TenantId | None) -> list[ApiKey]:
        found = await self._access.keys(tenant)
        self._readers += 1
        if self._readers == 2:
            self._both.set()
        await self._both.wait()
        return found


async def two_administrators_cannot_revoke_each_other() -> None:
    async with new_server() as server:
        records, clock = server.system.records, server.system.clock
        for tenant in ("local", "boss"):
            await server.as_tenant(tenant, admin=True)
        both = [key.key_id for key in await records.access.keys(None) if key.admin]
        assert len(both) == 2
        together: Any = Together(records.access)
        ends = await asyncio.gather(
            *(revoke(together, records.documents, clock, key_id) for key_id in both), return_exceptions=True
        )
        assert ends.count(None) == 1
        assert sum(isinstance(end, LastAdminKey) for end in ends) == 1
        left = [key for key in await records.access.keys(None) if key.admin and is_usable(key, clock.now())]
        assert len(left) == 1


async def test_two_administrators_cannot_revoke_each_other() -> None:
    await two_administrators_cannot_revoke_each_other()


@pytest.mark.parametrize(
    "point", ["key.revoking.before", "key.revoking.after", "key.revoke.before", "key.revoke.after"]
)
async def test_a_revocation_that_died_half_way_is_repeated(admin: Api, clock: JumpingClock, point: str) -> None:
    records = admin.system.records
    await admin.as_tenant("boss", admin=True)
    first, second = [key.key_id for key in await records.access.keys(None) if key.admin]

    def die(passed: str) -> None:
        if passed == point:
            raise Crashed

    faults.arm(die)
    try:
        with pytest.raises(Crashed):
            await revoke(records.access, records.documents, clock, first)
    finally:
        faults.arm(None)
    await revoke(records.access, records.documents, clock, first)
    with pytest.raises(LastAdminKey):
        await revoke(records.access, records.documents, clock, second)
