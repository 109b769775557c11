"""The session of AWS for this process: what it has read of the services' descriptions is read once."""

from functools import cache
from typing import Any

from aiobotocore.session import get_session


@cache
def aws_session() -> Any:
    return get_session()
