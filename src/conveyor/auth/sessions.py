"""Sessions of the dashboard. A browser that shows a link, once, or a key gets a cookie that stands for that key; it
acts for the key's tenant, never as an administrator, and no longer than the key may be used.

Links and sessions are rows, kept by the hash of their token: a restart ends no session, any process can end one, and
who reads the rows can use none of them.
"""

import secrets
from hashlib import sha256
from typing import NamedTuple

import msgspec

from conveyor.auth.keys import KeyCache, is_usable
from conveyor.clock import Clock
from conveyor.engines.records import Document, Records
from conveyor.errors import LinkRefused, SessionEnded
from conveyor.faults import crashpoint
from conveyor.model import ApiKey, TenantId
from conveyor.settings import Settings

SESSION = "session"
LINK = "sign_in_link"
# They are looked up before it is known whose they are.
OWNER = TenantId("~sessions")

_BYTES = 32
_LONGEST = 100


class DashboardSession(msgspec.Struct, frozen=True):
    """The body of a row of either kind, as JSON."""

    key_id: str
    created_at: float


class Token(NamedTuple):
    """What a browser shows, and until when that is good."""

    text: str
    expires_at: float

    @property
    def path(self) -> str:
        """The path of a link. What follows # stays in the browser: no log and no proxy sees it, and whoever only looks
        at the link does not use it up."""
        return f"/#/sign-in/{self.text}"


_sessions = msgspec.json.Decoder(DashboardSession)


class Sessions:
    """Makes, finds and ends them."""

    def __init__(self, records: Records, clock: Clock, settings: Settings) -> None:
        self._records = records
        self._clock = clock
        self._settings = settings
        # A session is looked at with every request. One that was ended works for two more seconds at most.
        self._keys = KeyCache(self, clock)

    async def link(self, key_id: str) -> Token:
        """A link that starts one session of this key."""
        return await self._keep(LINK, key_id, self._settings.sign_in_link_seconds)

    async def begin(self, key_id: str) -> Token:
        """A session of this key."""
        return await self._keep(SESSION, key_id, self._settings.session_seconds)

    async def redeem(self, text: str) -> Token:
        """The session that a link starts, for the first who shows it. Raises LinkRefused."""
        row = await self._row(LINK, _digest(text))
        if row is None or not await self._records.documents.remove_row(row):
            raise LinkRefused
        crashpoint("session.redeem.between")
        return await self.begin(_sessions.decode(row.body).key_id)

    async def end(self, text: str) -> None:
        """End a session; one that is not there is no error."""
        row = await self._row(SESSION, _digest(text))
        if row is not None:
            await self._records.documents.remove_row(row)

    async def authenticate(self, text: str) -> ApiKey:
        """The key that this session stands for, without an administrator's rights. Raises SessionEnded."""
        key = await self._keys.key(_digest(text))
        if key is None or not is_usable(key, self._clock.now()):
            raise SessionEnded
        return msgspec.structs.replace(key, admin=False)

    async def key(self, digest: str) -> ApiKey | None:
        """The key of a session as it is now, by the hash of the session's token."""
        row = await self._row(SESSION, digest)
        return None if row is None else await self._records.access.key(_sessions.decode(row.body).key_id)

    async def _row(self, kind: str, digest: str) -> Document | None:
        return await self._records.documents.document(kind, OWNER, digest)

    async def _keep(self, kind: str, key_id: str, seconds: float) -> Token:
        now = self._clock.now()
        token = Token(secrets.token_urlsafe(_BYTES), now + seconds)
        body = msgspec.json.encode(DashboardSession(key_id, now))
        await self._records.documents.create_rows(
            [Document(kind, OWNER, _digest(token.text), body, expires_at=token.expires_at)]
        )
        return token


def _digest(text: str) -> str:
    return sha256(text[:_LONGEST].encode(errors="replace")).hexdigest()
