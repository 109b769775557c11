"""The troubles of a soak: each does something to the server or its engines, lets it last a moment, and undoes it."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tests.servers import postgres, redis
from tests.soaking.soaked_server import SmallDisk, SoakedServer, emulator_pid

_HOUR = 3600.0
# The clock stays within so much of the right time: what the API promises for a day lasts.
_MAX_OFFSET = 6 * _HOUR
# A clock that is set back by less than the longest Retry-After, an hour, makes retries wait for as long: they may have
# been asked to. So the steps are short, or longer than that.
_STEPS = (90.0, 2 * _HOUR, 5 * _HOUR)


@dataclass
class Troubled:
    """What troubles act on."""

    server: SoakedServer
    disk: SmallDisk
    chance: random.Random

    async def lasts(self, least: float, longest: float) -> None:
        await asyncio.sleep(self.chance.uniform(least, longest))


Trouble = Callable[[Troubled], Awaitable[None]]


async def kill(world: Troubled) -> None:
    await asyncio.to_thread(world.server.kill)
    await world.lasts(0.0, 1.5)
    await asyncio.to_thread(world.server.start)


async def restart(world: Troubled) -> None:
    await asyncio.to_thread(world.server.stop)
    await asyncio.to_thread(world.server.start)


async def stop_and_continue(world: Troubled) -> None:
    """For longer than a lease, at times: what it then writes is stale."""
    world.server.freeze()
    try:
        await world.lasts(0.5, 9.0)
    finally:
        world.server.thaw()


async def kill_child(world: Troubled) -> None:
    """One that fetches, or that calls handlers."""
    children = world.server.children
    if children:
        with suppress(ProcessLookupError):
            os.kill(world.chance.choice(children), signal.SIGKILL)


async def step_clock(world: Troubled) -> None:
    clock, step = world.server.clock, world.chance.choice(_STEPS)
    sign = world.chance.choice((1, -1))
    clock.step(sign * step if abs(clock.offset + sign * step) <= _MAX_OFFSET else -sign * step)


async def step_clock_and_kill(world: Troubled) -> None:
    await asyncio.to_thread(world.server.kill)
    await step_clock(world)
    await asyncio.to_thread(world.server.start)


async def fill_disk(world: Troubled) -> None:
    try:
        await asyncio.to_thread(world.disk.fill)
        await world.lasts(1.0, 5.0)
    finally:
        world.disk.free()


async def restart_postgres(world: Troubled) -> None:
    await asyncio.to_thread(postgres.server().stop)
    await world.lasts(0.0, 3.0)
    await asyncio.to_thread(postgres.server().start)


async def freeze_redis(world: Troubled) -> None:
    redis.redis().freeze()
    try:
        await world.lasts(0.5, 4.0)
    finally:
        redis.redis().thaw()


async def restart_redis(world: Troubled) -> None:
    """It forgets all."""
    await asyncio.to_thread(redis.redis().kill)
    await world.lasts(0.0, 3.0)
    await asyncio.to_thread(redis.redis().start)


async def cut_aws(world: Troubled) -> None:
    """The emulator forgets all when it ends, so it stays: nobody can reach it."""
    door = world.server.door
    assert door is not None
    target, door.target = door.target, None
    door.cut()
    try:
        await world.lasts(0.2, 4.0)
    finally:
        door.target = target


async def freeze_aws(world: Troubled) -> None:
    os.kill(emulator_pid(), signal.SIGSTOP)
    try:
        await world.lasts(0.5, 4.0)
    finally:
        os.kill(emulator_pid(), signal.SIGCONT)


_EVERYWHERE: Mapping[str, Trouble] = {
    "kill": kill,
    "restart": restart,
    "stop and continue": stop_and_continue,
    "kill of a child": kill_child,
    "clock step": step_clock,
    "clock step and kill": step_clock_and_kill,
}
_OF_STACK: Mapping[str, Mapping[str, Trouble]] = {
    "embedded": {},
    "postgres": {
        "Postgres restart": restart_postgres,
        "Redis restart": restart_redis,
        "Redis frozen": freeze_redis,
    },
    "aws": {
        "AWS cut off": cut_aws,
        "AWS frozen": freeze_aws,
        "Redis restart": restart_redis,
        "Redis frozen": freeze_redis,
    },
}


def troubles_of(world: Troubled) -> Mapping[str, Trouble]:
    """Those that the stack has; a full disk only where one of its own is mounted."""
    disks: Mapping[str, Trouble] = {"full disk": fill_disk} if world.disk.is_mounted else {}
    return {**_EVERYWHERE, **_OF_STACK[world.server.stack], **disks}
