"""Dashboard sessions. A browser that presents a sign-in link, once, or a key gets a cookie that represents the key. The
session acts for the key's tenant and never outlives the key. It acts as an administrator only for a quarter of an hour
after someone presented an administrator's key in it, and no longer than that key is valid.

Links and sessions are documents under the hash of their token: sessions survive a restart, any process can end one,
and a reader of the documents cannot use them.
"""

import hmac
import secrets
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import NamedTuple

import msgspec

from conveyor.auth.keys import KeyCache, is_usable
from conveyor.clock import Clock
from conveyor.engines.records import Document, IdempotencyClaim, Records
from conveyor.errors import Conflict, LinkRefused, SessionEnded
from conveyor.faults import crashpoint
from conveyor.model import ApiKey, TenantId
from conveyor.settings import Settings

SESSION = "session"
LINK = "sign_in_link"
# The tenant is unknown when a token is looked up.
OWNER = TenantId("~sessions")

# How long a session acts as an administrator.
ADMIN_SECONDS = 900.0

_BYTES = 32
_MAX_TOKEN_LENGTH = 100
_TRIES = 5


class DashboardSession(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a session or link document, as JSON."""

    key_id: str
    created_at: float
    # The administrator's key that was presented in it, and until when it counts.
    admin_key_id: str | None = None
    admin_until: float = 0.0


class Token(NamedTuple):
    """The token of a session or link, and its expiry."""

    text: str
    expires_at: float

    @property
    def path(self) -> str:
        """The path of a link. The fragment stays in the browser: logs and proxies do not see it, and a link preview
        does not use it up."""
        return f"/#/sign-in/{self.text}"


_sessions = msgspec.json.Decoder(DashboardSession)


class Sessions:
    """Creates, finds and ends sessions and links."""

    def __init__(self, records: Records, clock: Clock, settings: Settings) -> None:
        self._records = records
        self._clock = clock
        self._settings = settings
        # Every request looks its session up. The cache keeps an ended session usable for at most two seconds.
        self._keys = KeyCache(self, clock)

    async def link(self, key_id: str) -> Token:
        """Create a link that starts one session of this key."""
        return await self._create(LINK, key_id, self._settings.sign_in_link_seconds)

    async def link_as(self, token: Token, key_id: str, answer: IdempotencyClaim | None) -> IdempotencyClaim | None:
        """Create the link of this token, and store the answer to the claimed request with it. If the caller lost the
        claim, create nothing and return the stored claim."""
        crashpoint("session.link.before")
        existing = await self._records.documents.create_documents([self._document(LINK, token, key_id)], None, answer)
        crashpoint("session.link.after")
        return existing

    async def begin(self, key_id: str) -> Token:
        """Create a session of this key."""
        return await self._create(SESSION, key_id, self._settings.session_seconds)

    async def redeem(self, text: str) -> Token:
        """Start a session from a link, once. Raises LinkRefused."""
        row = await self._row(LINK, _digest(text))
        if row is None or not await self._records.documents.remove_document(row):
            raise LinkRefused
        crashpoint("session.redeem.between")
        return await self.begin(_sessions.decode(row.body).key_id)

    async def end(self, text: str) -> None:
        """End a session. An unknown session is not an error."""
        row = await self._row(SESSION, _digest(text))
        if row is not None:
            await self._records.documents.remove_document(row)

    async def become_admin(self, text: str, admin_key_id: str) -> float:
        """Have a session act as an administrator for a while, because this key was presented in it. Returns until when.
        Raises SessionEnded."""
        until = self._clock.now() + ADMIN_SECONDS
        await self._rewrite(text, admin_key_id, until)
        return until

    async def leave_admin(self, text: str) -> None:
        """Have a session act for its tenant only."""
        await self._rewrite(text, None, 0.0)

    async def admin_until(self, text: str) -> float | None:
        """Until when a session acts as an administrator; None if it does not."""
        row = await self._row(SESSION, _digest(text))
        if row is None:
            return None
        session = _sessions.decode(row.body)
        return session.admin_until if await self._is_admin(session) else None

    async def authenticate(self, text: str) -> ApiKey:
        """The key of a session, with the rights that the session has now. Raises SessionEnded."""
        key = await self._keys.key(_digest(text))
        if key is None or not is_usable(key, self._clock.now()):
            raise SessionEnded
        return key

    async def key(self, digest: str) -> ApiKey | None:
        """The key of a session, by the hash of the session's token, with the rights of the session."""
        row = await self._row(SESSION, digest)
        if row is None:
            return None
        session = _sessions.decode(row.body)
        key = await self._records.access.key(session.key_id)
        return None if key is None else msgspec.structs.replace(key, admin=await self._is_admin(session))

    async def _is_admin(self, session: DashboardSession) -> bool:
        now = self._clock.now()
        if session.admin_key_id is None or session.admin_until <= now:
            return False
        key = await self._records.access.key(session.admin_key_id)
        return key is not None and key.admin and is_usable(key, now)

    async def _rewrite(self, text: str, admin_key_id: str | None, until: float) -> None:
        digest = _digest(text)
        for _ in range(_TRIES):
            row = await self._row(SESSION, digest)
            if row is None:
                raise SessionEnded
            session = _sessions.decode(row.body)
            session = msgspec.structs.replace(session, admin_key_id=admin_key_id, admin_until=until)
            body = msgspec.json.encode(session)
            crashpoint("session.admin.before")
            written = await self._records.documents.replace_document(msgspec.structs.replace(row, body=body))
            crashpoint("session.admin.after")
            if written is not None:
                self._keys.forget(digest)
                return
        raise Conflict("Other requests changed the session at the same time. Try again.")

    async def _row(self, kind: str, digest: str) -> Document | None:
        return await self._records.documents.document(kind, OWNER, digest)

    async def _create(self, kind: str, key_id: str, seconds: float) -> Token:
        token = Token(secrets.token_urlsafe(_BYTES), self._clock.now() + seconds)
        await self._records.documents.create_documents([self._document(kind, token, key_id)])
        return token

    def _document(self, kind: str, token: Token, key_id: str) -> Document:
        body = msgspec.json.encode(DashboardSession(key_id, self._clock.now()))
        return Document(kind, OWNER, _digest(token.text), body, expires_at=token.expires_at)


def derived_token(signing_key: bytes, link_id: str) -> str:
    """The token of a link that a repeated request must get again. It is stored nowhere."""
    digest = hmac.digest(signing_key, f"sign-in link {link_id}".encode(), "sha256")
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


def _digest(text: str) -> str:
    return sha256(text[:_MAX_TOKEN_LENGTH].encode(errors="replace")).hexdigest()
