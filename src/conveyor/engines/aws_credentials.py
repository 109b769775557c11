"""The AWS credentials of this process, for every client. botocore's chain finds them: the environment, a profile, SSO,
a web identity (IRSA), a process, a container (ECS, EKS Pod Identity) or an instance role.

They are found once, and renewed before they expire, which may call other services: always in a thread. In the last 15
minutes one call renews them while the others go on with the old ones; in the last 10, all wait.
"""

import asyncio
import threading
from functools import cache
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, NoCredentialsError
from botocore.session import get_session

# Variables of botocore that are read from the environment otherwise than by default: it ignores AWS_REGION.
SESSION_VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}

_MANDATORY_SECONDS = 600
# How soon to try again to renew credentials that are still valid.
_REST_SECONDS = 10.0


class AwsCredentials:
    """Credentials that renew themselves. Raises BotoCoreError if there are none."""

    def __init__(self) -> None:
        self._finding = threading.Lock()
        self._found: Any = None
        self._frozen: Any = None
        self._rest_until = 0.0

    async def current(self) -> Any:
        """An access key, a secret key and a token that are valid for minutes."""
        found, frozen = self._found, self._frozen
        if found is None or frozen is None or _expires(found, _MANDATORY_SECONDS):
            return await asyncio.to_thread(self.load)
        now = asyncio.get_running_loop().time()
        if _expires(found) and now >= self._rest_until:
            self._rest_until = now + _REST_SECONDS
            return await asyncio.to_thread(self.load)
        return frozen

    def load(self) -> Any:
        """The same, for callers with a thread of their own."""
        try:
            with self._finding:
                if self._found is None:
                    self._found = get_session(env_vars=SESSION_VARIABLES).get_credentials()
                found = self._found
            if found is None:
                raise NoCredentialsError
            frozen = self._frozen = found.get_frozen_credentials()
        except ClientError as error:
            # Not of the service that the caller talks to.
            raise CredentialRetrievalError(provider="chain", error_msg=str(error)) from error
        except (OSError, ValueError, KeyError) as error:
            # A token file, a process or an endpoint that does not give what it should.
            raise CredentialRetrievalError(provider="chain", error_msg=repr(error)) from error
        return frozen

    def invalidate(self) -> None:
        """A service says that they have expired: find them anew."""
        self._found = self._frozen = None


@cache
def aws_credentials() -> AwsCredentials:
    """Those of this process."""
    return AwsCredentials()


def missing_credentials(error: BotoCoreError) -> str:
    """The message for credentials that cannot be used."""
    if isinstance(error, NoCredentialsError):
        return "No AWS credentials found: set AWS_ACCESS_KEY_ID or AWS_PROFILE, or assign a role."
    return f"The AWS credentials could not be loaded: {error}"


def _expires(found: Any, within: int | None = None) -> bool:
    """Whether credentials expire within so many seconds; those of the environment and of plain profiles never do."""
    needed = getattr(found, "refresh_needed", None)
    return needed is not None and bool(needed(within))
