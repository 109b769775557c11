"""Idempotency claims that are held in memory: of requests whose one write makes everything, with the answer.

One process owns the database, so that nobody else can claim the same key. Nothing is lost with the process: a request
that it had not answered has made nothing.
"""

from conveyor.clock import CLOCK_SLACK
from conveyor.engines.records import Claimed, IdempotencyClaim

# Claims stay after failures only. Beyond this many, the oldest are forgotten, and their requests may be repeated.
_MAX_CLAIMS = 10_000

_Key = tuple[str, str, str]


class HeldClaims:
    """The claims by tenant, route and key."""

    def __init__(self) -> None:
        self._claims: dict[_Key, IdempotencyClaim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def find(self, tenant: str, route: str, key: str, now: float) -> IdempotencyClaim | None:
        claim = self._claims.get((tenant, route, key))
        return claim if claim is not None and claim.expires_at > now else None

    def hold(self, row: IdempotencyClaim, now: float) -> Claimed:
        """Hold a claim whose key is free in the database, by the same rules as there."""
        held = self.find(row.tenant, row.route, row.key, now)
        if held is not None:
            is_over = held.lease_until <= now or held.lease_until > row.lease_until + CLOCK_SLACK
            if not is_over or held.fingerprint != row.fingerprint:
                return Claimed(False, held)
            # It keeps its subject: the request that held it may still write.
            row = IdempotencyClaim(
                row.tenant, row.route, row.key, row.fingerprint, held.subject, row.lease_until, row.expires_at
            )
        self._claims.pop(_key(row), None)
        if len(self._claims) >= _MAX_CLAIMS:
            del self._claims[next(iter(self._claims))]
        self._claims[_key(row)] = row
        return Claimed(True, row)

    def holds(self, row: IdempotencyClaim) -> bool:
        """Whether this claim, answered or not, is the one that is held."""
        held = self._claims.get(_key(row))
        return held is not None and (held.subject, held.fingerprint) == (row.subject, row.fingerprint)

    def release(self, row: IdempotencyClaim) -> bool:
        """Release a claim if it is held. False if it is not, or by a request that took it over."""
        held = self._claims.get(_key(row))
        if held is None or (held.subject, held.lease_until) != (row.subject, row.lease_until):
            return False
        del self._claims[_key(row)]
        return True

    def answered(self, row: IdempotencyClaim) -> None:
        """The database has the answer."""
        if self.holds(row):
            del self._claims[_key(row)]


def _key(row: IdempotencyClaim) -> _Key:
    return row.tenant, row.route, row.key
