"""One Redis server, and calls that survive its restart.

Calls that arrive during a round trip share the next one. When the connection breaks, it is unknown which of them were
executed, and all are sent again: every script must be idempotent (answers.lua). A call that is not executed in time
fails.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha1
from importlib import resources
from typing import Any

import msgspec
import structlog
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from conveyor.clock import Clock
from conveyor.engines.redis.address import RedisAddress
from conveyor.errors import EngineFailed

log = structlog.get_logger()

Argument = str | bytes | int | float

# The timeout of a call, and of one round trip, in seconds.
PATIENCE = 10.0
_ROUND_TRIP = 3.0

_MAX_IN_ONE_TRIP = 256
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0

# Retryable: the server is unreachable, is starting, or has just become a replica.
_BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_NOT_NOW = (exceptions.ClusterDownError, exceptions.TryAgainError)
# The client reports these as connection errors, but a retry does not help.
_REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)


class Script(msgspec.Struct, frozen=True):
    """A script and its hash."""

    text: str
    sha: str


def load_script(*names: str) -> Script:
    """Load the files of these names as one script."""
    files = resources.files(__package__)
    text = "\n".join(files.joinpath(f"{name}.lua").read_text() for name in ("prelude", *names))
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class _Call(msgspec.Struct, eq=False):
    """A pending command or script."""

    script: Script | None
    arguments: tuple[Argument, ...]
    deadline: float
    answer: "asyncio.Future[Any]"


class Server:
    """Use `open_server` to create it."""

    def __init__(self, address: RedisAddress, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._client = Redis(
            **address.options(),
            # This module retries: the client's retries would hide which call they belong to.
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_ROUND_TRIP,
            socket_connect_timeout=_ROUND_TRIP,
            protocol=2,
        )
        # Unanswered calls, oldest first.
        self._open: dict[int, _Call] = {}
        self._numbers = itertools.count()
        self._arrived = asyncio.Event()
        self._known: set[str] = set()

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Run a script. Raises EngineFailed."""
        return await self._call(script, (len(keys), *keys, *arguments))

    async def command(self, *arguments: Argument) -> Any:
        """Run an idempotent command."""
        return await self._call(None, arguments)

    async def info(self, section: str, name: str) -> str | None:
        """A field of the server's INFO."""
        said: dict[str, Any] = await self.command("INFO", section)
        return str(said[name]) if name in said else None

    async def _call(self, script: Script | None, arguments: tuple[Argument, ...]) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[number] = _Call(script, arguments, self._clock.monotonic() + PATIENCE, answer)
        self._arrived.set()
        try:
            return await answer
        finally:
            self._open.pop(number, None)

    async def carry(self) -> None:
        """Send calls to the server until cancelled."""
        failures = 0
        while True:
            await self._arrived.wait()
            calls = list(itertools.islice(self._waiting(), _MAX_IN_ONE_TRIP))
            if not calls:
                self._arrived.clear()
                continue
            problem = await self._attempt(calls)
            if problem is None:
                if failures:
                    log.info("redis answers again", server=self._address.shown)
                failures = 0
                continue
            failures += 1
            if failures == 1:
                log.warning("redis does not answer", server=self._address.shown, error=problem)
            self._give_up(problem)
            longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**failures)
            await self._clock.sleep(longest * (0.5 + self._clock.jitter() / 2))

    def _waiting(self) -> "itertools.filterfalse[_Call]":
        return itertools.filterfalse(lambda call: call.answer.done(), self._open.values())

    async def _attempt(self, calls: list[_Call]) -> str | None:
        """One round trip. Returns the problem if a retry may help: the unanswered calls are then sent again."""
        try:
            answers = await self._trip(calls)
        except _REFUSED as error:
            answers = [error] * len(calls)
        except _BROKEN as error:
            return _say(error)
        except Exception as error:
            # A bug, here or in the client: fail the calls, or their callers would wait forever.
            answers = [error] * len(calls)
        problem = None
        for call, answer in zip(calls, answers, strict=True):
            problem = self._settle(call, answer) or problem
        if problem is not None:
            # The name may resolve to another server now. A failure to close the connection must not end this loop: no
            # call
            # would ever be answered again.
            with suppress(Exception):
                await self._client.connection_pool.disconnect()
        return problem

    async def _trip(self, calls: list[_Call]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.execute_command(*self._spoken(call))
            return list(await pipe.execute(raise_on_error=False))

    def _spoken(self, call: _Call) -> tuple[Argument, ...]:
        if call.script is None:
            return call.arguments
        if call.script.sha in self._known:
            return ("EVALSHA", call.script.sha, *call.arguments)
        return ("EVAL", call.script.text, *call.arguments)

    def _settle(self, call: _Call, answer: Any) -> str | None:
        if isinstance(answer, exceptions.NoScriptError) and call.script is not None:
            # The server restarted: send the call again at once, with the text of the script.
            self._known.discard(call.script.sha)
            return None
        if isinstance(answer, _NOT_NOW) or _read_only(answer):
            return _say(answer)
        if call.answer.done():
            return None
        if isinstance(answer, Exception):
            call.answer.set_exception(EngineFailed(f"The Redis at {self._address.shown} failed: {_say(answer)}."))
            return None
        if call.script is not None:
            self._known.add(call.script.sha)
        call.answer.set_result(answer)
        return None

    def _give_up(self, problem: str) -> None:
        now = self._clock.monotonic()
        for call in list(self._waiting()):
            if call.deadline <= now:
                reason = f"The Redis at {self._address.shown} does not answer: {problem}."
                call.answer.set_exception(EngineFailed(reason))

    async def close(self) -> None:
        for call in list(self._waiting()):
            call.answer.set_exception(EngineFailed("The connection to the Redis is closed."))
        await self._client.aclose()


def _read_only(answer: Any) -> bool:
    """Whether the error is retryable. For a command in a script, older servers say so only in the text."""
    return isinstance(answer, exceptions.ResponseError) and (
        isinstance(answer, exceptions.ReadOnlyError) or "READONLY" in str(answer)
    )


def _say(error: object) -> str:
    return str(error).rstrip(".") or type(error).__name__


@asynccontextmanager
async def open_server(address: RedisAddress, clock: Clock) -> AsyncIterator[Server]:
    """Connect, yield the server, disconnect."""
    server = Server(address, clock)
    carrying = asyncio.create_task(server.carry(), name="redis")
    try:
        yield server
    finally:
        carrying.cancel()
        await asyncio.wait([carrying])
        await server.close()
