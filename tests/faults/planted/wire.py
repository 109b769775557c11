"""Bugs in what the server takes from hostile clients."""

from typing import Any
from urllib.parse import urlsplit

import pytest

from conveyor.accept import spec
from conveyor.api import auth, creation, job_routes, key_routes, request_bodies, stream_routes
from conveyor.api.addressing import Addressing
from conveyor.api.forwarding import Forwarding
from conveyor.api.framing import ChunkedFraming
from conveyor.auth.failed_keys import FailedKeys
from tests.faults.planted import Planted
from tests.flow.test_api_keys import the_last_administrator_stays
from tests.flow.test_status import a_large_job_is_counted_for_an_administrator_only
from tests.security import test_bodies as bodies
from tests.security import test_ended_access as access
from tests.security import test_wire as wire
from tests.security.test_proxies import other_peers_are_not_believed
from tests.unit.accept.test_unique_fields import a_field_is_not_taken_twice


def _unchecked_lines(patch: pytest.MonkeyPatch) -> None:
    """The parser gets all that arrives of a chunked body."""
    patch.setattr(ChunkedFraming, "piece_end", lambda self, data, start: len(data))


def _any_rate(patch: pytest.MonkeyPatch) -> None:
    """A body may take its time as long as something arrives now and then."""
    patch.setattr(request_bodies, "MIN_RATE", 0.001)


def _places_for_all(patch: pytest.MonkeyPatch) -> None:
    """A body that comes without a key has a place in the budget."""
    read = request_bodies.read_body

    async def read_as_with_a_key(request: Any, *limits: Any) -> Any:
        request.scope["auth"] = request.scope.get("auth") or "nobody"
        return await read(request, *limits)

    patch.setattr(creation, "read_body", read_as_with_a_key)


def _any_origin_is_a_url(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(auth, "_authority", lambda origin: urlsplit(origin).netloc)


def _allowed_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A stream asks once who is there."""

    async def always(_: Any) -> bool:
        return True

    patch.setattr(stream_routes, "is_still_allowed", always)


def _any_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Addressing, "_answers_to", lambda self, host: True)


def _last_field_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(spec, "check_unique_fields", lambda body: None)


def _guesses_are_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FailedKeys, "failed", lambda self, address: None)


def _any_key_is_revoked(patch: pytest.MonkeyPatch) -> None:
    async def revoke(access: Any, documents: Any, clock: Any, key_id: str) -> None:
        await access.revoke_key(key_id, clock.now())

    patch.setattr(key_routes, "revoke", revoke)


def _anyone_is_a_proxy(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Forwarding, "_trusts", lambda self, address: True)


def _any_key_counts_rows(patch: pytest.MonkeyPatch) -> None:
    async def allowed(*_: Any) -> None:
        return None

    patch.setattr(job_routes, "check_verifiable", allowed)


PLANTED = [
    Planted("a trailer is a header", _unchecked_lines, wire.a_trailer_is_no_header),
    Planted("trailers have no limit", _unchecked_lines, wire.trailers_without_end_are_cut_off),
    Planted("chunk extensions are taken", _unchecked_lines, wire.chunk_extensions_are_refused),
    Planted("a body has no minimum rate", _any_rate, bodies.a_slow_body_is_given_up_within_seconds),
    Planted("requests without a key take places", _places_for_all, bodies.requests_without_a_key_take_no_places),
    Planted("an origin that is no URL is our failure", _any_origin_is_a_url, wire.no_header_is_our_failure),
    Planted("a stream outlives its key", _allowed_for_ever, access.streams_end_with_their_key_or_session),
    Planted("a loopback server answers to any name", _any_name, wire.other_names_are_refused_on_loopback),
    Planted("the last of two fields counts", _last_field_counts, a_field_is_not_taken_twice),
    Planted("invalid keys have no limit", _guesses_are_free, access.invalid_keys_have_a_limit),
    Planted("the last administrator is revoked", _any_key_is_revoked, the_last_administrator_stays),
    Planted("anyone is believed to be a proxy", _anyone_is_a_proxy, other_peers_are_not_believed),
    Planted("any key has any rows counted", _any_key_counts_rows, a_large_job_is_counted_for_an_administrator_only),
]
