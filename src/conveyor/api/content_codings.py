"""Accept-Encoding: whether to send a body as gzip or as it is (RFC 9110, 12.5.3)."""

import re
from collections.abc import Sequence

_WEIGHT = re.compile(r"\s*q\s*=\s*([01](?:\.[0-9]{0,3})?)\s*", re.ASCII | re.IGNORECASE)
# Acceptable, and liked less than any coding that the client names.
_UNNAMED = 0.0001


def sends_gzip(accepted: Sequence[str], names_range: bool, names_version: bool) -> bool:
    """Whether to send gzip to a client with these Accept-Encoding headers. A client must name gzip to get it. A range
    is one of the body itself, because few clients can use a part of a gzip stream, unless If-Range names the version
    in gzip (`names_version`) or the client takes nothing but gzip."""
    weights = _weights(accepted)
    gzip = max(weights.get("gzip", 0.0), weights.get("x-gzip", 0.0))
    identity = weights.get("identity", 0.0 if weights.get("*") == 0.0 else _UNNAMED)
    if gzip == 0.0:
        return False
    return names_version or identity == 0.0 if names_range else gzip >= identity


def _weights(accepted: Sequence[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part in ",".join(accepted).split(","):
        coding, _, parameter = part.partition(";")
        weight = _WEIGHT.fullmatch(parameter)
        # What is not a weight is none: the coding is named.
        weights[coding.strip().lower()] = 1.0 if weight is None else float(weight[1])
    return weights
