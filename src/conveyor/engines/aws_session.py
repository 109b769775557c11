"""One botocore session per process, so that service descriptions are loaded once, with the credentials of all clients;
and what botocore knows of regions, for clients that are not its own."""

from functools import cache
from typing import Any

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import get_session
from botocore.regions import EndpointResolver

from conveyor.engines.aws_credentials import SESSION_VARIABLES, aws_credentials
from conveyor.errors import InvalidSetting


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


@cache
def _endpoints() -> Any:
    return EndpointResolver(aws_session().get_component("data_loader").load_data("endpoints"))


def service_host(service: str, region: str) -> str:
    """The host of a service in a region of any partition. AWS_USE_FIPS_ENDPOINT and AWS_USE_DUALSTACK_ENDPOINT, or the
    profile, choose another one than the usual."""
    session = aws_session()
    found: dict[str, Any] | None = _endpoints().construct_endpoint(
        service,
        region,
        use_fips_endpoint=bool(session.get_config_variable("use_fips_endpoint")),
        use_dualstack_endpoint=bool(session.get_config_variable("use_dualstack_endpoint")),
    )
    if found is None:
        raise InvalidSetting(
            f"The region {region} has no such endpoint of {service}. "
            "Unset AWS_USE_DUALSTACK_ENDPOINT and AWS_USE_FIPS_ENDPOINT, or name an endpoint in the URL."
        )
    host: str = found["hostname"]
    return host
