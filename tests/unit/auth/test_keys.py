"""Keys: how they look, who may use them, and how stale the cache may be."""

import re

import pytest

from conveyor.auth.keys import KeyCache, authenticate, bearer_token, check_tenant, make_key, parse_key
from conveyor.clock import SystemClock
from conveyor.errors import InvalidField, InvalidKey, MissingKey
from conveyor.model import ApiKey
from tests.support.clocks import JumpingClock


class Kept:
    """Keys in a dict, and how often they were asked for."""

    def __init__(self, *keys: ApiKey) -> None:
        self.rows = {key.key_id: key for key in keys}
        self.reads = 0

    async def key(self, key_id: str) -> ApiKey | None:
        self.reads += 1
        return self.rows.get(key_id)


def test_a_key_shows_its_id_and_keeps_only_the_hash() -> None:
    text, key = make_key(SystemClock(), "acme", "laptop")
    assert re.fullmatch(r"cv_[0-9a-z]{26}_[0-9a-f]{64}", text)
    parsed = parse_key(text)
    assert parsed.key_id == key.key_id
    assert parsed.secret not in repr(key)
    assert (key.tenant, key.name) == ("acme", "laptop")


def test_keys_differ() -> None:
    assert len({make_key(SystemClock(), "acme")[0] for _ in range(100)}) == 100


@pytest.mark.parametrize("name", ["a", "0", "acme-1_x", "a" * 63])
def test_tenants(name: str) -> None:
    assert check_tenant(name) == name


@pytest.mark.parametrize("name", ["", "-a", "_a", "A", "a" * 64, "a b", "a/b", "a\n", "ä", "a#b"])
def test_names_that_are_no_tenants(name: str) -> None:
    with pytest.raises(InvalidField):
        check_tenant(name)
    with pytest.raises(InvalidField):
        make_key(SystemClock(), name)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
def test_names_that_are_no_names(name: str) -> None:
    with pytest.raises(InvalidField):
        make_key(SystemClock(), "acme", name)


@pytest.mark.parametrize("header", ["Bearer abc", "bearer abc", "BEARER   abc", " Bearer abc "])
def test_bearer(header: str) -> None:
    assert bearer_token(header) == "abc"


@pytest.mark.parametrize("header", [None, "", "abc", "Basic abc", "Bearer", "Bearer ", "Bearer a b"])
def test_no_bearer(header: str | None) -> None:
    with pytest.raises(MissingKey):
        bearer_token(header)


@pytest.mark.parametrize(
    "text", ["", "cv_", "cv_x_y", "xx_" + "0" * 26 + "_" + "0" * 64, "cv_" + "0" * 26 + "_" + "0" * 63 + "\n"]
)
def test_text_that_is_no_key(text: str) -> None:
    with pytest.raises(InvalidKey):
        parse_key(text)


async def test_only_the_whole_key_passes() -> None:
    text, key = make_key(SystemClock(), "acme")
    other, _ = make_key(SystemClock(), "acme")
    kept = Kept(key)
    assert await authenticate(kept, SystemClock(), text) == key
    for wrong in (other, text[:-1] + ("0" if text[-1] != "0" else "1"), f"cv_{key.key_id}_{parse_key(other).secret}"):
        with pytest.raises(InvalidKey):
            await authenticate(kept, SystemClock(), wrong)


async def test_an_expired_key_does_not_pass() -> None:
    clock = JumpingClock()
    text, key = make_key(clock, "acme", expires_at=clock.now() + 60)
    assert await authenticate(Kept(key), clock, text) == key
    clock.advance(61)
    with pytest.raises(InvalidKey):
        await authenticate(Kept(key), clock, text)


async def test_a_flood_is_one_read_and_revocation_is_seen_in_two_seconds() -> None:
    clock = JumpingClock()
    text, key = make_key(clock, "acme")
    kept = Kept(key)
    cache = KeyCache(kept, clock)
    for _ in range(100):
        await authenticate(cache, clock, text)
    assert kept.reads == 1
    kept.rows[key.key_id] = ApiKey(key.key_id, key.tenant, None, key.secret_sha256, key.created_at, revoked_at=1.0)
    clock.advance(2.0)
    with pytest.raises(InvalidKey):
        await authenticate(cache, clock, text)


async def test_the_cache_is_bounded_and_remembers_the_unknown() -> None:
    clock = JumpingClock()
    kept = Kept()
    cache = KeyCache(kept, clock, size=10)
    for number in range(100):
        assert await cache.key(f"{number}") is None
    assert len(cache._entries) == 10
    await cache.key("99")
    assert kept.reads == 100
