"""Logins to RDS and Aurora by IAM: the password of a connection is a token, signed when the connection is made.

A token is a presigned request that is never sent. It is valid for 15 minutes, and only for logging in: connections
outlive it. A source of credentials that fails is to the pool like a server that does not answer.
"""

from collections.abc import Awaitable, Callable
from urllib.parse import unquote, urlencode, urlsplit

from botocore.auth import SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError

from conveyor.engines.aws_credentials import aws_credentials

_VALID_SECONDS = 900


def token_source(dsn: str, region: str) -> Callable[[], Awaitable[str]]:
    """A password for the driver, which calls it once for each new connection."""
    parts = urlsplit(dsn)
    address, user = f"{parts.hostname}:{parts.port or 5432}", unquote(parts.username or "")

    async def token() -> str:
        try:
            credentials = await aws_credentials().current()
        except BotoCoreError as error:
            raise ConnectionError(f"no AWS credentials to log in with, which auth=iam needs: {error}") from error
        request = AWSRequest("GET", f"https://{address}/?{urlencode({'Action': 'connect', 'DBUser': user})}")
        SigV4QueryAuth(credentials, "rds-db", region, expires=_VALID_SECONDS).add_auth(request)
        url: str = request.url
        return url.removeprefix("https://")

    return token
