"""A receiver of webhooks on a free loopback port, that answers as a test says and remembers what it was sent.

python receiver.py LOG PORT SEED     the same in a process of its own, for tests that kill it: it fails at random, and
                                     writes each request to LOG before it answers. Port 0 takes a free one, which is
                                     the first line of standard output. It ends with its standard input.
"""

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from standardwebhooks.webhooks import Webhook

from tests.support.target_site import Listener, Seen, answer, read_request


class Told(NamedTuple):
    """A webhook as it came in."""

    seen: Seen

    @property
    def id(self) -> str:
        return self.seen.headers["webhook-id"]

    @property
    def json(self) -> Any:
        return json.loads(self.seen.body)

    @property
    def event(self) -> str:
        event: str = self.json["type"]
        return event

    @property
    def signatures(self) -> list[str]:
        return self.seen.headers["webhook-signature"].split(" ")

    def signed_with(self, secret: str) -> bool:
        """As the reference implementation signs it."""
        return signature(secret, self.id, self.seen.headers["webhook-timestamp"], self.seen.body) in self.signatures


def signature(secret: str, event_id: str, timestamp: str, body: bytes) -> str:
    return Webhook(secret).sign(event_id, datetime.fromtimestamp(int(timestamp), UTC), body.decode())


Act = Callable[[Told, asyncio.StreamWriter], Awaitable[None]]


def answering(status: int, **headers: str) -> Act:
    async def act(told: Told, writer: asyncio.StreamWriter) -> None:
        answer(writer, b"", status, **headers)

    return act


async def hang(told: Told, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def hang_up(told: Told, writer: asyncio.StreamWriter) -> None:
    writer.close()


def then_hanging(status: int = 200) -> Act:
    """The head of an answer, a part of its body, and nothing more."""

    async def act(told: Told, writer: asyncio.StreamWriter) -> None:
        _begin(writer, status)
        await writer.drain()
        await asyncio.Event().wait()

    return act


def then_cut(status: int = 200) -> Act:
    """The head of an answer and a part of its body; then the connection breaks."""

    async def act(told: Told, writer: asyncio.StreamWriter) -> None:
        _begin(writer, status)
        await writer.drain()
        writer.close()

    return act


def _begin(writer: asyncio.StreamWriter, status: int) -> None:
    writer.write(f"HTTP/1.1 {status} Whatever\r\nContent-Length: 1000\r\nRetry-After: 7\r\n\r\nsome".encode())


class Receiver(Listener):
    """Answers 200, or what the next of `acts` does; `always` stands for all that have no act of their own."""

    def __init__(self, host: str = "127.0.0.1", *, tls: bool = False) -> None:
        super().__init__(host, tls=tls)
        self.told: list[Told] = []
        self.acts: list[Act] = []
        self.always: Act = answering(200)
        self.at_once = self.most_at_once = 0

    def url(self, path: str = "/hook", host: str | None = None) -> str:
        return f"{'https' if self.tls else 'http'}://{host or self.host}:{self.port}{path}"

    def events(self) -> list[str]:
        return [told.event for told in self.told]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            told = Told(await read_request(reader))
            self.told.append(told)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            try:
                await (self.acts.pop(0) if self.acts else self.always)(told, writer)
            finally:
                self.at_once -= 1
            await writer.drain()


async def fail_at_random(log: Path, port: int, seed: int) -> None:
    """Half of the time 2xx; else an error, an early end, or an answer after a while."""
    chance = random.Random(seed)
    with log.open("a", buffering=1) as file:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while not writer.is_closing():
                    told = Told(await read_request(reader))
                    choice = chance.choice(["ok"] * 6 + ["500", "503", "429", "cut", "late"])
                    headers = {name: told.seen.headers[f"webhook-{name}"] for name in ("id", "timestamp", "signature")}
                    line = {**headers, "body": told.seen.body.decode(), "ok": choice in ("ok", "late")}
                    file.write(json.dumps(line) + "\n")
                    if choice == "cut":
                        writer.close()
                    elif choice == "late":
                        await asyncio.sleep(0.05)
                        answer(writer, b"", 202)
                    else:
                        answer(writer, b"", 200 if choice == "ok" else int(choice))
                    await writer.drain()
            except (OSError, EOFError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", port, reuse_address=True)
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(fail_at_random(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
