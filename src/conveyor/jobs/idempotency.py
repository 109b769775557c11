"""Requests under an Idempotency-Key: claimed before they are carried out, answered in the same step as what they make.

The same request sent again gets the same answer, byte for byte. Another request under the key, and one that is still
under way, are conflicts. A claim whose process died is taken over after its lease, with the id that it reserved, so
that the second try makes the same thing and not a second one.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import IdempotencyClaim, Records
from conveyor.errors import ConveyorError, IdempotencyInFlight, IdempotencyMismatch, Overloaded
from conveyor.faults import crashpoint
from conveyor.model import TenantId
from conveyor.settings import Settings


class IdempotentRequest(NamedTuple):
    """The client's own name for a request, and what the request was."""

    route: str
    key: str
    fingerprint: str


class Accepted(NamedTuple):
    """What the client is told. `body` is the same bytes for every replay."""

    status: int
    body: bytes
    subject: str
    replayed: bool = False


class Claim(NamedTuple):
    """The right to carry a request out. `subject` is the id of what it makes; `row` is None without a key."""

    subject: str
    row: IdempotencyClaim | None

    def answer(self, status: int, body: bytes, expires_at: float) -> IdempotencyClaim | None:
        """The row that answers the request, to be written with what it makes."""
        if self.row is None:
            return None
        return msgspec.structs.replace(self.row, status=status, body=body, expires_at=expires_at)


class Idempotency:
    """Claims requests."""

    def __init__(self, settings: Settings, clock: Clock, records: Records) -> None:
        self._settings = settings
        self._clock = clock
        self._records = records

    @property
    def keep_until(self) -> float:
        return self._clock.now() + self._settings.idempotency_seconds

    async def claim(self, tenant: TenantId, request: IdempotentRequest | None, subject: str) -> Claim | Accepted:
        """A ticket, or the answer that this very request got before."""
        if request is None:
            return Claim(subject, None)
        now = self._clock.now()
        row = IdempotencyClaim(
            tenant=tenant,
            route=request.route,
            key=request.key,
            fingerprint=request.fingerprint,
            subject=subject,
            lease_until=now + self._settings.idempotency_lease_seconds,
            expires_at=now + self._settings.idempotency_seconds,
        )
        crashpoint("request.claim.before")
        claimed = await self._records.access.claim(row)
        crashpoint("request.claim.after")
        if claimed.granted:
            return Claim(claimed.row.subject, claimed.row)
        return standing_answer(claimed.row, request.fingerprint)

    @asynccontextmanager
    async def carrying_out(self, ticket: Claim) -> AsyncIterator[None]:
        """A request that is refused made nothing, and a mended one may come under the same key. What fails on our side
        may have made something: its claim stands until it is taken over."""
        try:
            yield
        except ConveyorError as error:
            refused = error.status < HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, Overloaded)
            if ticket.row is not None and refused:
                await self._records.access.unclaim(ticket.row)
            raise


def standing_answer(row: IdempotencyClaim, fingerprint: str) -> Accepted:
    """The answer in a row that is not ours to answer, or the conflict that it is."""
    if row.fingerprint != fingerprint:
        raise IdempotencyMismatch
    if row.status == 0:
        raise IdempotencyInFlight
    return Accepted(row.status, row.body, row.subject, replayed=True)
