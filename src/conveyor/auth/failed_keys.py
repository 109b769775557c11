"""Limits how many invalid keys one address may present, so that guessing costs the store next to nothing.

Above the limit, the keys of that address are refused unread, except those that were valid here before: users behind the
same address go on working.
"""

import ipaddress
from hashlib import sha256
from typing import Any

from conveyor.clock import Clock
from conveyor.errors import TooManyFailedKeys

_MINUTE = 60.0
# A provider assigns a whole network to one customer.
_IPV6_PREFIX = 64
_MAX_ADDRESSES = 10_000
_MAX_KEYS = 10_000


class FailedKeys:
    """The addresses that presented invalid keys to this process, and the keys that were valid."""

    def __init__(self, clock: Clock, per_minute: int) -> None:
        self._clock = clock
        self._per_minute = per_minute
        # Failures that count, and when that was; they are forgotten at the rate of the limit.
        self._failures: dict[str, tuple[float, float]] = {}
        self._valid: dict[bytes, None] = {}

    def check(self, address: str, key: str) -> None:
        """Raise TooManyFailedKeys if the address is above the limit and the key was never valid."""
        if self._count(address) > self._per_minute - 1 and _digest(key) not in self._valid:
            raise TooManyFailedKeys(retry_after=max(1, round(_MINUTE / self._per_minute)))

    def failed(self, address: str) -> None:
        """Count a key that is not valid."""
        count = self._count(address) + 1
        self._failures.pop(_network(address), None)
        _make_place(self._failures, _MAX_ADDRESSES)
        self._failures[_network(address)] = (count, self._clock.monotonic())

    def succeeded(self, key: str) -> None:
        """Remember a valid key."""
        digest = _digest(key)
        if digest not in self._valid:
            _make_place(self._valid, _MAX_KEYS)
            self._valid[digest] = None

    def _count(self, address: str) -> float:
        if not self._failures:
            # As for most requests.
            return 0.0
        count, at = self._failures.get(_network(address), (0.0, 0.0))
        return max(0.0, count - (self._clock.monotonic() - at) * self._per_minute / _MINUTE)


def _make_place(table: dict[Any, Any], size: int) -> None:
    while len(table) >= size:
        del table[next(iter(table))]


def _network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="replace")).digest()
