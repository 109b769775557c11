"""Calls to one node. Those that arrive during a round trip share the next one.

When the connection breaks, it is unknown which of them were executed, and all are sent again: every script must be
idempotent (answers.lua).
"""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha1
from importlib import resources
from typing import Any

import msgspec
import structlog
from redis import exceptions
from redis.asyncio import Redis

from conveyor.clock import Clock
from conveyor.engines.redis.address import RedisNode
from conveyor.engines.redis.topology import UNREACHABLE
from conveyor.errors import EngineFailed

log = structlog.get_logger()

Argument = str | bytes | int | float

_MAX_IN_ONE_TRIP = 256
_FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0

# The client reports these as connection errors, but a retry does not help.
REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
# The node says where a call belongs, or that its slot is not served yet. MovedError is an AskError.
_ELSEWHERE = (exceptions.AskError, exceptions.TryAgainError, exceptions.ClusterDownError)
# The node has just become a replica, or lost its master or its replicas. For a command in a script, older servers say
# so only in the text.
_NOT_NOW = ("READONLY", "NOREPLICAS", "MASTERDOWN")


class Script(msgspec.Struct, frozen=True):
    """A script and its hash."""

    text: str
    sha: str


def load_script(*names: str) -> Script:
    """Load the files of these names as one script."""
    files = resources.files(__package__)
    text = "\n".join(files.joinpath(f"{name}.lua").read_text() for name in ("prelude", *names))
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class RedisCall(msgspec.Struct, eq=False):
    """A pending command or script."""

    script: Script | None
    arguments: tuple[Argument, ...]
    slot: int
    deadline: float
    answer: "asyncio.Future[Any]"
    # For a command about one node.
    node: RedisNode | None = None
    # The node that imports the slot, for one round trip.
    asking: RedisNode | None = None
    # How often a node sent it on since the nodes were last found.
    redirects: int = 0
    problem: str = ""
    # The calls that it waits among.
    home: "dict[RedisCall, None] | None" = None

    def move(self, home: "dict[RedisCall, None] | None") -> None:
        if self.home is not None:
            self.home.pop(self, None)
        self.home = home
        if home is not None:
            home[self] = None

    def fail(self, message: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(EngineFailed(message))


class NodeCalls:
    """The calls to one node, and the connection to it.

    `elsewhere` gets the calls that this node does not serve, with its error; `trouble` hears that the node does not
    serve any; `place` finds the node of a call again.
    """

    def __init__(
        self,
        node: RedisNode,
        client: "Redis",
        clock: Clock,
        shown: str,
        elsewhere: Callable[[RedisCall, Exception, RedisNode], None],
        trouble: Callable[[], None],
        place: Callable[[RedisCall], None],
    ) -> None:
        self._node = node
        self._client = client
        self._clock = clock
        self._shown = shown
        self._elsewhere = elsewhere
        self._trouble = trouble
        self._place = place
        # Oldest first.
        self._calls: dict[RedisCall, None] = {}
        self._in_flight: set[RedisCall] = set()
        self._arrived = asyncio.Event()
        self._known: set[str] = set()
        self._task = asyncio.create_task(self._carry(), name=f"redis {node}")

    def put(self, call: RedisCall) -> None:
        call.move(self._calls)
        self._arrived.set()

    def waiting(self) -> list[RedisCall]:
        """The calls that are not in flight."""
        return [call for call in self._calls if call not in self._in_flight and not call.answer.done()]

    async def close(self) -> list[RedisCall]:
        """Returns the unanswered calls. Whether those in flight were executed is unknown."""
        await end(self._task)
        with suppress(Exception):
            await self._client.aclose()
        return [call for call in self._calls if not call.answer.done()]

    async def _carry(self) -> None:
        """Send calls to the node until cancelled."""
        failures = 0
        while True:
            await self._arrived.wait()
            open_calls = (call for call in self._calls if not call.answer.done())
            calls = list(itertools.islice(open_calls, _MAX_IN_ONE_TRIP))
            if not calls:
                self._arrived.clear()
                continue
            problem = await self._attempt(calls)
            if problem is None:
                if failures:
                    log.info("redis answers again", server=self._shown, node=str(self._node))
                failures = 0
                continue
            failures += 1
            if failures == 1:
                log.warning("redis does not answer", server=self._shown, node=str(self._node), error=problem)
            self._give_up(problem)
            self._trouble()
            await self._clock.sleep(pause_after(failures, self._clock))
            for call in self.waiting():
                call.asking = None
                self._place(call)

    async def _attempt(self, calls: list[RedisCall]) -> str | None:
        """One round trip. Returns the problem if a retry may help: the unanswered calls are then sent again."""
        self._in_flight = set(calls)
        try:
            answers = await self._trip(calls)
        except REFUSED as error:
            answers = [error] * len(calls)
        except UNREACHABLE as error:
            return say(error)
        except Exception as error:
            # A bug, here or in the client: fail the calls, or their callers would wait forever.
            answers = [error] * len(calls)
        finally:
            self._in_flight = set()
        problem = None
        for call, answer in zip(calls, answers, strict=True):
            problem = self._settle(call, answer) or problem
        if problem is not None:
            # The name may resolve to another server now. A failure to close the connection must not end this loop: no
            # call would ever be answered again.
            with suppress(Exception):
                await self._client.connection_pool.disconnect()
        return problem

    async def _trip(self, calls: list[RedisCall]) -> list[Any]:
        own = []
        async with self._client.pipeline(transaction=False) as pipe:
            for call in calls:
                if call.asking is not None:
                    pipe.execute_command("ASKING")
                own.append(len(pipe))
                pipe.execute_command(*self._spoken(call))
            answers = await pipe.execute(raise_on_error=False)
        return [answers[place] for place in own]

    def _spoken(self, call: RedisCall) -> tuple[Argument, ...]:
        if call.script is None:
            return call.arguments
        if call.script.sha in self._known:
            return ("EVALSHA", call.script.sha, *call.arguments)
        return ("EVAL", call.script.text, *call.arguments)

    def _settle(self, call: RedisCall, answer: Any) -> str | None:
        if call.answer.done():
            return None
        if isinstance(answer, exceptions.NoScriptError) and call.script is not None:
            # The server restarted: send the call again at once, with the text of the script.
            self._known.discard(call.script.sha)
            return None
        if isinstance(answer, exceptions.ResponseError) and _is_not_now(answer):
            return say(answer)
        if isinstance(answer, _ELSEWHERE):
            self._elsewhere(call, answer, self._node)
            return None
        if isinstance(answer, Exception):
            call.fail(f"The Redis at {self._shown} failed: {say(answer)}.")
            return None
        if call.script is not None:
            self._known.add(call.script.sha)
        call.answer.set_result(answer)
        return None

    def _give_up(self, problem: str) -> None:
        now = self._clock.monotonic()
        for call in self.waiting():
            call.problem = problem
            if call.deadline <= now:
                call.fail(f"The Redis at {self._shown} does not answer: {problem}.")


async def end(task: "asyncio.Task[None]") -> None:
    """Cancel the task until it ends: the client may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)


def pause_after(failures: int, clock: Clock) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(LONGEST_PAUSE, _FIRST_PAUSE * 2.0**failures) * (0.5 + clock.jitter() / 2)


def say(error: object) -> str:
    return str(error).rstrip(".") or type(error).__name__


def _is_not_now(error: exceptions.ResponseError) -> bool:
    is_typed = isinstance(error, exceptions.ReadOnlyError | exceptions.MasterDownError)
    return is_typed or any(code in str(error) for code in _NOT_NOW)
