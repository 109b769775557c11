"""The checks of `conveyor doctor` for Redis: the name of each check, and what to fix, or None."""

from collections.abc import Awaitable, Callable
from typing import Any

from conveyor.clock import Clock
from conveyor.engines.redis.coordinator import RedisCoordinator
from conveyor.engines.redis.redis_server import Server
from conveyor.errors import ConveyorError, EngineFailed

Finding = tuple[str, str | None]

_OLDEST = (6, 2)
# Seconds of clock skew that is tolerated. Nothing depends on it.
_MAX_SKEW = 5.0
_UNKNOWN = "unknown"


async def run_checks(server: Server, coordinator: RedisCoordinator, clock: Clock) -> list[Finding]:
    """Run the checks in order, each on every master. A check that fails to run reports its error."""

    checks: list[tuple[str, Callable[[], Awaitable[Finding]]]] = [
        ("reachable", lambda: _reachable(server)),
        ("version", lambda: _version(server)),
        ("eviction", lambda: _eviction(server)),
        ("write and conditional write", lambda: _writes(coordinator, clock.new_id("check"))),
        ("clock", lambda: _skew(server, clock)),
    ]
    findings: list[Finding] = []
    for name, check in checks:
        try:
            said, problem = await check()
        except ConveyorError as error:
            said, problem = "", error.message
        findings.append((f"redis: {name}{said and f': {said}'}", problem))
    return findings


async def eviction_problem(server: Server) -> str | None:
    """Why Conveyor cannot rely on the server, if it evicts keys that do not expire: leases."""
    for node, policy in (await _info(server, "memory", "maxmemory_policy")).items():
        if policy.startswith("allkeys"):
            return (
                f"The server {node} evicts any key when its memory is full (maxmemory-policy is {policy}). "
                "Set maxmemory-policy to noeviction, or use a server that is not shared with a cache."
            )
    return None


async def _reachable(server: Server) -> Finding:
    masters = await server.each("PING")
    return ("" if len(masters) == 1 else f"{len(masters)} masters"), None


async def _version(server: Server) -> Finding:
    """Valkey also says which Redis it stands for."""
    names = await _info(server, "server", "server_name")
    valkey = await _info(server, "server", "valkey_version")
    versions = await _info(server, "server", "redis_version")
    for version in versions.values():
        if version != _UNKNOWN and tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            return "", f"This is Redis {version}; use 6.2 or newer, or any Valkey."
    shown = {
        f"Valkey {valkey[node]}" if names[node] == "valkey" else f"Redis {version}"
        for node, version in versions.items()
    }
    return ", ".join(sorted(shown)), None


async def _eviction(server: Server) -> Finding:
    problem = await eviction_problem(server)
    if problem is not None:
        return "", problem
    policies = sorted(set((await _info(server, "memory", "maxmemory_policy")).values()))
    notes = {
        "noeviction": "noeviction",
        _UNKNOWN: "unknown, because this user may not run INFO; it must not be allkeys-*",
    }
    dropped = "when its memory is full it drops limits and counters, never leases; noeviction is better"
    return ", ".join(notes.get(policy, f"{policy}: {dropped}") for policy in policies), None


async def _writes(coordinator: RedisCoordinator, key: str) -> Finding:
    await coordinator.cache(key, b"old", 10.0)
    swapped = await coordinator.swap(key, b"old", b"new", 10.0)
    refused = not await coordinator.swap(key, b"old", b"never", 10.0)
    if not swapped or not refused or await coordinator.cached(key) != b"new":
        return "", "A written value was not read back. Is this address one server, or several behind a balancer?"
    return "", None


async def _skew(server: Server, clock: Clock) -> Finding:
    for node, (seconds, micros) in (await server.each("TIME")).items():
        skew = int(seconds) + int(micros) / 1e6 - clock.now()
        if abs(skew) > _MAX_SKEW:
            return "", f"The clock of {node} differs from this machine's by {skew:.1f} s. Synchronize both with NTP."
    return "", None


async def _info(server: Server, section: str, name: str) -> dict[str, str]:
    """A field of INFO, of every master. An ACL may deny the command."""
    try:
        said: dict[Any, dict[str, Any]] = await server.each("INFO", section)
    except EngineFailed as error:
        if "permission" not in error.message.lower():
            raise
        return {str(node): _UNKNOWN for node in server.masters()}
    return {str(node): str(fields.get(name, _UNKNOWN)) for node, fields in said.items()}
