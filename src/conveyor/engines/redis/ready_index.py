"""The ready index on Redis. Its keys have one hash tag of their own, so that a cluster keeps them in one slot."""

from collections.abc import Collection, Sequence

import msgspec

from conveyor.clock import Clock
from conveyor.engines.ready import Look, LookRequest, ReadyMark
from conveyor.engines.redis.redis_server import Argument, Server, load_script
from conveyor.model import RunId, TenantId

_MARK = load_script("ready", "mark_runs")
_HASTEN = load_script("ready", "hasten_tenant")
_KNOWN = load_script("ready", "known_runs")
_LOOK = load_script("ready", "look_for_runs")

_MICROS = 1_000_000
# Marks that one script applies: others wait while it runs.
_MARKS_AT_ONCE = 200

_encode = msgspec.msgpack.encode


_decoder = msgspec.msgpack.Decoder(Look)


class RedisReadyIndex:
    """A ReadyIndex."""

    def __init__(self, server: Server, prefix: str, time: Clock | None) -> None:
        self._server = server
        self._keys = [f"{{{prefix}:ready}}"]
        self._time = time

    async def mark_runs(self, marks: Sequence[ReadyMark], *, is_built: bool = False) -> None:
        for start in range(0, max(1, len(marks)), _MARKS_AT_ONCE):
            batch = marks[start : start + _MARKS_AT_ONCE]
            is_last = start + _MARKS_AT_ONCE >= len(marks)
            await self._server.run(_MARK, self._keys, [self._now(), _encode(batch), int(is_built and is_last)])

    async def hasten_tenant(self, tenant: TenantId) -> None:
        await self._server.run(_HASTEN, self._keys, [self._now(), tenant])

    async def look_for_runs(self, request: LookRequest) -> Look:
        return _decoder.decode(await self._server.run(_LOOK, self._keys, [self._now(), _encode(request)]))

    async def known_runs(self, run_ids: Collection[RunId]) -> frozenset[RunId]:
        asked = list(run_ids)
        known = await self._server.run(_KNOWN, self._keys, [self._now(), *asked]) if asked else []
        return frozenset(run_id for run_id, is_known in zip(asked, known, strict=True) if is_known)

    def _now(self) -> Argument:
        return "" if self._time is None else round(self._time.now() * _MICROS)
