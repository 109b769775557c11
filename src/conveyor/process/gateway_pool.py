"""GatewayPool: the gateways that the requests of a job may go through, and which one is next. Pure; the gate (gate.py)
knows which of them are up.

Requests go round the gateways, each as often as its weight says, in an order that spreads them evenly. With
`sticky: host` all requests to a host go through the same gateway, at all workers: the one with the highest score for
the host (weighted rendezvous hashing), so that a gateway that is down moves only its own hosts, and moves them back.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

from conveyor.egress.origins import plain_origin
from conveyor.model import Gateway

# Hosts whose gateway is remembered, and sets of gateways that are up whose order is.
_MAX_HOSTS = 2000
_MAX_ORDERS = 32

Members = tuple[int, ...]


class GatewayPool:
    """The members of a pool by their places in it. A gateway alone is a pool of one. `seed` is where to begin: jobs of
    one task must not all go to the first gateway."""

    def __init__(self, gateway: Gateway, seed: int = 0) -> None:
        self.weights = tuple(each.weight for each in gateway.pool) or (1,)
        self.is_sticky = gateway.sticky is not None
        self.names = _names(gateway)
        self.members: Members = tuple(range(len(self.names)))
        self._next = seed
        self._orders: dict[Members, list[int]] = {}
        self._hosts: dict[tuple[str, Members], int] = {}

    def take(self, members: Members) -> int:
        """The gateway for the next request, of those that are up."""
        order = self._orders.get(members)
        if order is None:
            if len(self._orders) >= _MAX_ORDERS:
                self._orders.clear()
            order = self._orders[members] = _spread(members, self.weights)
        self._next += 1
        return order[self._next % len(order)]

    def of_host(self, host: str, members: Members) -> int:
        """The gateway for requests to this host, of those that are up."""
        known = self._hosts.get((host, members))
        if known is None:
            if len(self._hosts) >= _MAX_HOSTS:
                self._hosts.clear()
            known = self._hosts[host, members] = max(members, key=lambda member: self._score(host, member))
        return known

    def _score(self, host: str, member: int) -> float:
        digest = blake2b(f"{host}\n{self.names[member]}".encode(), digest_size=8).digest()
        # In (0, 1), never at its ends.
        share = (int.from_bytes(digest, "big") + 0.5) / 2.0**64
        return -self.weights[member] / math.log(share) if share < 1 else math.inf


def make_pool(gateway: Gateway | None, seed: int = 0) -> GatewayPool | None:
    """The pool of a gateway; None if there is none, or none with a URL."""
    pool = None if gateway is None else GatewayPool(gateway, seed)
    return pool if pool is not None and all(pool.names) else None


def _names(gateway: Gateway) -> tuple[str, ...]:
    """The names of the breakers: `gateway:` and the origin. Further gateways at the same origin, which differ in what
    must not be shown, have a number."""
    names: list[str] = []
    for member in gateway.members:
        url = member.proxy or member.url
        origin = plain_origin(url) if url else None
        name = "" if origin is None else f"gateway:{origin}"
        count = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{count + 1}" if count and name else name)
    return tuple(names)


def _spread(members: Members, weights: Sequence[int]) -> list[int]:
    """Each member as often as its weight says, as evenly as they go."""
    divisor = math.gcd(*(weights[member] for member in members))
    turns = [
        ((turn + 0.5) * divisor / weights[member], member)
        for member in members
        for turn in range(weights[member] // divisor)
    ]
    return [member for _, member in sorted(turns)]
