"""One botocore session per process, so that service descriptions are loaded once, with the credentials of all
clients."""

from functools import cache
from typing import Any

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import get_session

from conveyor.engines.aws_credentials import SESSION_VARIABLES, aws_credentials


class SessionCredentials(AioCredentials):  # type: ignore[misc]  # it has no types
    """What a client asks before it signs a request. The keys that it is made with are not used."""

    def __init__(self) -> None:
        super().__init__("unused", "unused", method="conveyor")

    async def get_frozen_credentials(self) -> Any:
        return await aws_credentials().current()


class SessionCredentialProvider:
    """Stands for the chain of the session."""

    async def load_credentials(self) -> SessionCredentials:
        return SessionCredentials()


@cache
def aws_session() -> Any:
    session = get_session(env_vars=SESSION_VARIABLES)
    session.register_component("credential_provider", SessionCredentialProvider())
    return session


def default_region() -> str | None:
    """The region of the environment or of the profile."""
    region: str | None = aws_session().get_config_variable("region")
    return region
