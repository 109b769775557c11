"""Responses of routes, for the OpenAPI document: a schema, or a problem."""

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from conveyor.api.problems import MEDIA_TYPE, Problem
from conveyor.api.schemas.shape import Shape


def problems(*statuses: int, key: bool = True) -> dict[int, ResponseSpec]:
    """Problem responses with these statuses; plus those of the key where one is required."""
    return {
        status: ResponseSpec(
            Problem, generate_examples=False, media_type=MEDIA_TYPE, description="A problem; see `code`."
        )
        for status in (sorted({401, 429, *statuses}) if key else statuses)
    }


def shaped(shape: type[msgspec.Struct], *statuses: int) -> dict[int, ResponseSpec]:
    """Responses with this schema; status 200 by default."""
    spec = ResponseSpec(shape, generate_examples=False, description=shape.__doc__ or "")
    return dict.fromkeys(statuses or (200,), spec)


def answers(shape: type[Shape], *statuses: int) -> dict[int, ResponseSpec]:
    """200 with this schema, or a problem."""
    return {**shaped(shape), **problems(*statuses)}
