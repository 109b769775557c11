"""Sessions: sign a browser in to the dashboard, and out."""

from typing import Annotated

import msgspec
from litestar import Response, delete, get, post
from litestar.datastructures import Cookie

from conveyor.api import operations
from conveyor.api.auth import authenticate_key, check_site, client_address, cookie_name, session_of
from conveyor.api.creation import accepted, read_keyed_optional, read_spec
from conveyor.api.dependencies import ApiRequest, SessionsPart, SystemPart, TenantPart, answer, dependencies_of
from conveyor.api.response_specs import answers, problems, shaped
from conveyor.api.schemas.session_shapes import AdminSession, LinkShape, SessionShape
from conveyor.auth.sessions import Token, derived_token
from conveyor.clock import iso_text
from conveyor.errors import Forbidden, InvalidField, InvalidKey, LinkRefused
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency

_MAX_BYTES = 4096

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class SignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either the token of a sign-in link, or an API key."""

    link: _Text | None = None
    key: _Text | None = None


@post(
    "/sign-in",
    summary="Sign in",
    status_code=204,
    operation_class=operations.takes(SignIn),
    responses=problems(400, 403, 413, 415, 429),
)
async def sign_in(request: ApiRequest, system: SystemPart, sessions: SessionsPart) -> Response[None]:
    """Starts a dashboard session; its cookie then represents the key. A link starts one session. The request must come
    from a page of this server, with the header `X-Conveyor-Dashboard`."""
    check_site(request)
    spec = await read_spec(request, _MAX_BYTES, SignIn)
    if (spec.link is None) == (spec.key is None):
        raise InvalidField("Give either `link` or `key`.", field="link")
    if spec.link is not None:
        token = await _redeem(request, sessions, spec.link)
    else:
        token = await sessions.begin((await authenticate_key(request, spec.key or "")).key_id)
    return Response(None, status_code=204, cookies=[_cookie(request, token.text, system.settings.session_seconds)])


async def _redeem(request: ApiRequest, sessions: SessionsPart, link: str) -> Token:
    failed_keys, address = dependencies_of(request.scope).failed_keys, client_address(request)
    failed_keys.check(address, link)
    try:
        return await sessions.redeem(link)
    except LinkRefused:
        failed_keys.failed(address)
        raise


@get("/session", summary="Show the session", responses=answers(SessionShape))
async def show_session(request: ApiRequest, tenant: TenantPart, sessions: SessionsPart) -> Response[bytes]:
    """The tenant and the key of the session or request, and until when the session acts as an administrator."""
    token = _own_session(request)
    until = None if token is None else await sessions.admin_until(token)
    shown = {"tenant": tenant, "key_id": request.auth.key_id, "key_name": request.auth.name}
    return answer({**shown, "admin_until": None if until is None else iso_text(until)})


class AdminSignIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An administrator's key."""

    key: _Text


@post(
    "/session/admin",
    summary="Act as an administrator",
    status_code=200,
    operation_class=operations.takes(AdminSignIn),
    responses=answers(AdminSession, 400, 403, 409, 413, 415, 429),
)
async def become_admin(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, sessions: SessionsPart
) -> Response[bytes]:
    """With an administrator's key, the dashboard session of this request may use the routes of administrators for 15
    minutes. 403 without a session, or with another key."""
    token = _own_session(request)
    if token is None:
        raise Forbidden(
            "Only a dashboard session can become an administrator's. Send the key with the request instead."
        )
    spec = await read_spec(request, _MAX_BYTES, AdminSignIn)
    try:
        key = await authenticate_key(request, spec.key)
    except InvalidKey:
        # 401 would say that the session has ended.
        raise Forbidden("The key is invalid, expired or revoked.") from None
    if not key.admin:
        raise Forbidden("The key is not an administrator's.")
    return answer({"admin_until": iso_text(await sessions.become_admin(token, key.key_id))})


@delete("/session/admin", summary="Stop acting as an administrator", responses=problems(403, 409))
async def leave_admin(request: ApiRequest, tenant: TenantPart, sessions: SessionsPart) -> None:
    """The session acts for its tenant only."""
    token = _own_session(request)
    if token is not None:
        await sessions.leave_admin(token)


@delete("/session", summary="Sign out", responses=problems(403))
async def sign_out(request: ApiRequest, sessions: SessionsPart) -> Response[None]:
    """Ends the session of this browser."""
    token = session_of(request)
    if token is not None:
        await sessions.end(token)
    return Response(None, status_code=204, cookies=[_cookie(request, "", 0)])


@post(
    "/sign-in/links",
    summary="Create a sign-in link",
    operation_class=operations.takes(operations.Nothing, operations.IDEMPOTENCY_KEY, required=False),
    responses={**shaped(LinkShape, 201), **problems(400, 403, 409)},
)
async def create_link(
    request: ApiRequest, system: SystemPart, tenant: TenantPart, sessions: SessionsPart
) -> Response[bytes]:
    """A path that opens the dashboard once, signed in with the key of this request. A session cannot create one,
    because it could then outlive itself."""
    if "session" in request.scope["state"]:
        raise Forbidden("A session cannot create sign-in links. Use an API key.")
    key_id = request.auth.key_id
    # A link signs in as the key that asked for it, so another key of the tenant must not get it by a replay.
    route = f"POST /v1/sign-in/links {key_id}"
    _, idempotent = await read_keyed_optional(request, _MAX_BYTES, operations.Nothing, route)

    async def carry_out(claim: Claim) -> Accepted:
        expires_at = system.clock.now() + system.settings.sign_in_link_seconds
        token = Token(derived_token(system.signing_key, claim.subject), expires_at)
        reply = claim.answer(201, msgspec.json.encode({"expires_at": iso_text(expires_at)}))
        return reply.unless_lost(await sessions.link_as(token, key_id, reply.row))

    idempotency = Idempotency(system.settings, system.clock, system.records)
    outcome = await idempotency.once(tenant, idempotent, system.clock.new_id("link"), carry_out)
    shown = msgspec.json.decode(outcome.body)
    path = Token(derived_token(system.signing_key, outcome.subject), 0.0).path
    return accepted(outcome._replace(body=msgspec.json.encode({"path": path, **shown})))


def _own_session(request: ApiRequest) -> str | None:
    """The session that authenticates this request; None if a key does."""
    token: str | None = request.scope["state"].get("session")
    return token


def _cookie(request: ApiRequest, token: str, seconds: float) -> Cookie:
    """A cookie that scripts and other sites cannot read. The Origin, or a trusted proxy, tells whether the browser uses
    TLS."""
    is_secure = request.scope["scheme"] == "https" or request.headers.get("origin", "").startswith("https:")
    return Cookie(
        key=cookie_name(request),
        value=token,
        path="/",
        max_age=int(seconds),
        httponly=True,
        samesite="strict",
        secure=is_secure,
    )
