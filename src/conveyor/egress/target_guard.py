"""The target guard. Gets the URL or the host that a user named, decides whether Conveyor may connect to it, and hands
on the one address to connect to.

The HTTP client's own parser reads the URL, so that both see the same host however it is spelled (127.1, 0x7f000001,
full-width digits). The guard resolves a name once and refuses it if any of its addresses is refused. The caller
connects to the address that was checked, so a second DNS answer has no effect. Every request to a user's target passes
the guard on each hop of a redirect: fetches, downloads, webhooks, lists of schedules, gateways of jobs.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from pyreqwest.http import Url

from conveyor.clock import Clock
from conveyor.egress.descriptors import OutOfDescriptors, are_exhausted
from conveyor.egress.lru import Lru
from conveyor.errors import BadInput, ConveyorError

Address = IPv4Address | IPv6Address
# Gets host and port, returns addresses as text. Raises OSError or UnicodeError if the name has none.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
# Gets an address, returns why it is refused, or None.
Policy = Callable[[str], str | None]

MAX_URL_LENGTH = 8192
MAX_HOST_LENGTH = 253
LOOKUP_THREADS = 32
_SCHEMES = ("http://", "https://")
# example.com/a, www.example.com:8080
_LIKE_A_HOST = re.compile(r"(?:(?:[\w-]+\.)+[a-zA-Z]{2,}|\d{1,3}(?:\.\d{1,3}){3})(?:[:/?#]|$)")
_NO_SCHEME = "relative URL without a base"
_AUTHORITY = re.compile(r"https?://[^/\\]", re.IGNORECASE)


class BadUrl(BadInput):
    """The URL is not valid for a request."""

    code = "bad_url"


class TargetRefused(BadInput):
    """The target is on an address that is not public. CONVEYOR_ALLOW_PRIVATE_TARGETS allows it."""

    code = "target_refused"


class DnsFailed(ConveyorError):
    """The name of the target has no address."""

    code = "dns_failed"
    status = 502


def parse_url(text: str) -> Url:
    """The URL of a target: http or https, a host, a port that exists, no user and password. Raises BadUrl."""
    if len(text) > MAX_URL_LENGTH:
        raise BadUrl(f"the URL is longer than {MAX_URL_LENGTH} characters")
    # The parser silently drops tabs and line breaks; here they indicate a broken list, or an attack.
    if not text.isprintable():
        raise BadUrl("the URL has a control character")
    try:
        url = Url(text)
    except ValueError as error:
        reason = str(error).replace(_NO_SCHEME, "it must begin with http:// or https://")
        if _LIKE_A_HOST.match(text):
            reason = "https:// is missing"
        raise BadUrl(f"not a URL: {reason}") from None
    problem = _url_problem(url, text)
    if problem is not None:
        raise BadUrl(problem)
    return url


def check_url(text: str) -> str | None:
    """What is wrong with the URL of a target, or None. It checks only the text, for use at submit."""
    try:
        parse_url(text)
    except BadUrl as error:
        return error.message
    return None


def url_problem(url: Url) -> str | None:
    """What is wrong with a parsed URL, such as that of a redirect, or None."""
    return _url_problem(url, str(url))


def _url_problem(url: Url, text: str) -> str | None:
    # The fast path for nearly every URL: each problem below shows in the text.
    usual = (
        text.startswith(_SCHEMES) and "@" not in text and ":0" not in text and "///" not in text and "\\" not in text
    )
    if not usual and (problem := _unusual_problem(url, text)) is not None:
        return problem
    host = url.host_str
    return (
        None
        if host and len(host) <= MAX_HOST_LENGTH and ".." not in host
        else "the host of the URL is not a valid name"
    )


def _unusual_problem(url: Url, text: str) -> str | None:
    if url.scheme not in {"http", "https"}:
        return "the URL must begin with http:// or https://"
    # The parser also takes http:host, http:/host, http:///host and backslashes for http://host.
    if not _AUTHORITY.match(text):
        return "the URL has no host"
    if url.username or url.password is not None:
        return "the URL has a user or password; send an Authorization header"
    return "the port of the URL must be between 1 and 65535" if url.port == 0 else None


def public_url(url: Url) -> str:
    """The URL without its query and userinfo, which often contain secrets; for messages."""
    return f"{url.origin_ascii}{url.path}"


# Everything that the IANA registries do not list as globally reachable, and addresses reserved by clouds.
_REFUSED_V4 = tuple(
    (IPv4Network(network), reason)
    for network, reason in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared address space (CGNAT)"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "cloud platform service"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "protocol assignment"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("255.255.255.255/32", "broadcast"),
        ("240.0.0.0/4", "reserved"),
    )
)
# Inside and outside of 2000::/3, the only block assigned for global unicast. First match wins.
_REFUSED_V6 = tuple(
    (IPv6Network(network), reason)
    for network, reason in (
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::/96", "IPv4-compatible"),
        ("64:ff9b:1::/48", "local-use translation (NAT64)"),
        ("100::/64", "discard-only"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
        ("2001::/23", "protocol assignment"),
        ("2001:db8::/32", "documentation"),
        ("3fff::/20", "documentation"),
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = IPv6Network("2002::/16")
_TEREDO = IPv6Network("2001::/32")
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})


def refusal(address: str | Address) -> str | None:
    """Why this address is refused, or None for global unicast. An IPv6 address that embeds an IPv4 address (mapped,
    NAT64, 6to4, Teredo, ISATAP) is judged by the embedded one."""
    ip = ip_address(address)
    if isinstance(ip, IPv4Address):
        return next((reason for network, reason in _REFUSED_V4 if ip in network), None)
    form, inner = _embedded(ip)
    for address_inside in inner:
        reason = refusal(address_inside)
        if reason is not None:
            return f"{reason}, as {form}"
    if inner and form != "ISATAP":
        return None
    reason = next((reason for network, reason in _REFUSED_V6 if ip in network), None)
    return reason or (None if ip in _GLOBAL_V6 else "reserved")


def _embedded(ip: IPv6Address) -> tuple[str, tuple[IPv4Address, ...]]:
    number = int(ip)
    if ip in _MAPPED:
        return "IPv4-mapped", (IPv4Address(number & 0xFFFFFFFF),)
    if ip in _NAT64:
        return "NAT64", (IPv4Address(number & 0xFFFFFFFF),)
    if ip in _SIX_TO_FOUR:
        return "6to4", (IPv4Address(number >> 80 & 0xFFFFFFFF),)
    if ip in _TEREDO:
        return "Teredo", (IPv4Address(number >> 64 & 0xFFFFFFFF), IPv4Address(~number & 0xFFFFFFFF))
    if number >> 32 & 0xFFFFFFFF in _ISATAP:
        return "ISATAP", (IPv4Address(number & 0xFFFFFFFF),)
    return "", ()


_LOCAL_SUFFIXES = (".localhost", ".localdomain", ".local", ".internal", ".intranet", ".lan", ".home.arpa")


def host_refusal(host: str, policy: Policy = refusal) -> str | None:
    """Why a host is refused without resolving it, or None; for requests whose names a proxy resolves."""
    literal = ip_literal(host)
    if literal is not None:
        return policy(literal)
    name = host.lower().rstrip(".")
    if "." not in name or name.endswith(_LOCAL_SUFFIXES):
        return "a name of the local network"
    return None


def ip_literal(host: str) -> str | None:
    """The IP address in the host of a parsed URL, or None if the host is a name."""
    if host.startswith("["):
        return host[1:-1]
    # The parser has normalized every IPv4 spelling to four numbers; a name cannot end in a digit after a dot.
    if ":" not in host and not host[-1:].isdigit():
        return None
    try:
        return str(ip_address(host))
    except ValueError:
        return None


class SystemResolver:
    """getaddrinfo, A and AAAA, in its own threads: names that hang must not occupy the threads of others."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        answers = await asyncio.get_running_loop().run_in_executor(self._threads, _lookup, host, port)
        return list(dict.fromkeys(answers))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _lookup(host: str, port: int) -> list[str]:
    # ADDRCONFIG: a machine without IPv6 gets no IPv6 addresses, which it could not reach.
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [str(answer[4][0]) for answer in answers]


@dataclass(slots=True)
class _ResolvedAnswer:
    """The checked addresses of a host, valid until `expires`, or the error of a refused or unknown one."""

    addresses: tuple[str, ...]
    error: TargetRefused | DnsFailed | None
    expires: float


class TargetGuard:
    """Resolves a host, checks every answer, and returns the address to connect to. One per event loop.

    It caches at most `size` checked answers, for `ttl` seconds each. Callers that ask for one host share a lookup.
    """

    def __init__(
        self,
        *,
        allow_private: bool,
        clock: Clock,
        resolver: Resolver | None = None,
        policy: Policy = refusal,
        ttl: float = 30.0,
        failure_ttl: float = 5.0,
        size: int = 4096,
    ) -> None:
        self.allow_private = allow_private
        self.clock = clock
        self._system = SystemResolver() if resolver is None else None
        self._resolver = resolver or self._system
        self._policy = policy
        self._ttl = ttl
        self._failure_ttl = failure_ttl
        self._answers: Lru[str, _ResolvedAnswer] = Lru(size)
        self._lookups: dict[str, asyncio.Task[_ResolvedAnswer]] = {}

    def check_name(self, host: str) -> None:
        """Raise TargetRefused for a host that is refused without resolving it (a proxy resolves it)."""
        reason = None if self.allow_private else host_refusal(host, self._policy)
        if reason is not None:
            raise TargetRefused(_refused(reason))

    def known(self, host: str) -> str | None:
        """The address to connect to, if the host has a fresh checked answer; else None."""
        answer = self._answers.get(host)
        fresh = answer is not None and answer.error is None and answer.expires > self.clock.monotonic()
        return answer.addresses[0] if answer is not None and fresh else None

    async def resolve(self, host: str, port: int, timeout: float | None = None) -> str:
        """The address to connect to. Raises TargetRefused, DnsFailed, OutOfDescriptors, or TimeoutError after `timeout`
        seconds."""
        answer = self._answers.get(host)
        if answer is None or answer.expires <= self.clock.monotonic():
            answer = await self._ask(host, port, timeout)
        if answer.error is not None:
            # A new exception for each caller: a shared one would collect the tracebacks of all.
            raise type(answer.error)(answer.error.message)
        return answer.addresses[0]

    def avoid(self, host: str, address: str) -> None:
        """Prefer another address of `host` from now on, because `address` does not answer."""
        answer = self._answers.get(host)
        if answer is not None and answer.addresses[:1] == (address,):
            answer.addresses = (*answer.addresses[1:], address)

    async def close(self) -> None:
        """Cancel the lookups in flight."""
        for lookup in self._lookups.values():
            lookup.cancel()
        await asyncio.gather(*self._lookups.values(), return_exceptions=True)
        if self._system is not None:
            self._system.close()

    async def _ask(self, host: str, port: int, timeout: float | None) -> _ResolvedAnswer:
        lookup = self._lookups.get(host)
        if lookup is None:
            lookup = self._lookups[host] = asyncio.create_task(self._look_up(host, port))
            lookup.add_done_callback(lambda _: self._lookups.pop(host, None))
        # Shielded: if one caller is cancelled or times out, others may still wait for the lookup.
        return await asyncio.wait_for(asyncio.shield(lookup), timeout)

    async def _look_up(self, host: str, port: int) -> _ResolvedAnswer:
        return self._answers.put(host, await self._answer(host, port))

    async def _answer(self, host: str, port: int) -> _ResolvedAnswer:
        literal = ip_literal(host)
        try:
            addresses = tuple(await self._addresses(host, port)) if literal is None else (literal,)
        except (OSError, UnicodeError):
            if are_exhausted():
                # Not an answer: it must not be cached.
                raise OutOfDescriptors from None
            addresses = ()
        now = self.clock.monotonic()
        if not addresses:
            return _ResolvedAnswer((), DnsFailed(), now + self._failure_ttl)
        reason = None if self.allow_private else self._first_refusal(addresses)
        error = None if reason is None else TargetRefused(_refused(reason))
        return _ResolvedAnswer(addresses, error, now + self._ttl)

    async def _addresses(self, host: str, port: int) -> Sequence[str]:
        assert self._resolver is not None
        return await self._resolver(host, port)

    def _first_refusal(self, addresses: Sequence[str]) -> str | None:
        return next((reason for address in addresses if (reason := self._policy(address)) is not None), None)


def _refused(reason: str) -> str:
    return f"the target is not public ({reason}); CONVEYOR_ALLOW_PRIVATE_TARGETS allows it"
