"""One botocore session per process, so that service descriptions are loaded once."""

from functools import cache
from typing import Any

from aiobotocore.session import get_session


@cache
def aws_session() -> Any:
    return get_session()
