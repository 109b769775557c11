"""A fleet on the emulators of AWS: each role has engines of its own, behind a gate with the policy of the role."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conveyor.clock import SystemClock
from conveyor.embedded import Embedded
from conveyor.settings import Settings
from conveyor.system import System, migrate, open_system
from deploy.aws.generate.calls import ROLES
from deploy.aws.generate.policies import FOLDER
from tests.faults.shim import Shim
from tests.servers import dynamodb, redis, s3, sources, sqs
from tests.servers.aws import REGION, aws
from tests.servers.event_targets import shared_targets
from tests.support.api import Api, serving
from tests.support.policy_gate import ACCOUNT, Ledger, Policy, PolicyGate

Policies = Mapping[str, dict[str, Any]]

# Those that every flow needs.
_RUNNING = ("work", "ingest")


@dataclass(frozen=True)
class GatedFleet:
    """The settings of each role, with its gate as the endpoint of every service."""

    settings: dict[str, Settings]
    ledger: Ledger
    place: Path

    async def migrate(self) -> None:
        await migrate(self.settings["operator"], SystemClock())

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RunningFleet"]:
        """The API, a worker and an ingester at work."""
        async with AsyncExitStack() as stack:
            systems = {
                role: await stack.enter_async_context(open_system(settings, SystemClock()))
                for role, settings in self.settings.items()
            }
            api = await stack.enter_async_context(serving(systems["api"]))
            fleet = RunningFleet(api, systems, self.ledger)
            await stack.enter_async_context(fleet.with_roles(_RUNNING))
            yield fleet


@dataclass(frozen=True)
class RunningFleet:
    """A fleet at work, seen by one tenant."""

    api: Api
    systems: dict[str, System]
    ledger: Ledger

    @asynccontextmanager
    async def with_roles(self, roles: Sequence[str]) -> AsyncIterator[None]:
        """Some roles at work, too."""
        async with AsyncExitStack() as stack:
            for role in roles:
                await stack.enter_async_context(Embedded(self.systems[role]).running({role}))
            yield


def checked_in() -> Policies:
    """The policies that stand under deploy/aws, as they are."""
    return {role: json.loads((FOLDER / f"{role}.json").read_text()) for role in ROLES}


def values_of(place: Path) -> dict[str, str]:
    """What stands for the placeholders of a policy, on the emulators."""
    # A bucket of its own: that of the other tests may be there already, and then nobody makes it.
    blobs = urlsplit(s3.url_of(place, has_own_bucket=True))
    targets = shared_targets()
    return {
        "AWS::Partition": "aws",
        "AWS::Region": REGION,
        "AWS::AccountId": ACCOUNT,
        "TablePrefix": urlsplit(dynamodb.url_for(place)).path.strip("/"),
        "QueuePrefix": urlsplit(sqs.url_of(place)).path.strip("/"),
        "Bucket": blobs.netloc,
        "BlobPrefix": blobs.path.strip("/"),
        "StateMachineArn": targets.machine,
        "EventBusArn": targets.bus,
        "SourceBucket": sources.BUCKET,
    }


def filled(document: dict[str, Any], values: Mapping[str, str]) -> Policy:
    """A policy with values for its placeholders."""
    text = json.dumps(document)
    for name, value in values.items():
        text = text.replace(f"${{{name}}}", value)
    return Policy(json.loads(text))


@asynccontextmanager
async def gated_fleet(place: Path, policies: Policies, **more: Any) -> AsyncIterator[GatedFleet]:
    """A gate for each role."""
    ledger, values = Ledger(), values_of(place)
    made: dict[str, Settings] = {}
    async with AsyncExitStack() as stack:
        for role in ROLES:
            gate = PolicyGate(role, filled(policies[role], values), ledger)
            shim = await stack.enter_async_context(Shim(aws(), gate, keeps_host=True))
            made[role] = _settings(place, role, shim.url, more)
        yield GatedFleet(made, ledger, place)


def _settings(place: Path, role: str, endpoint: str, more: Mapping[str, Any]) -> Settings:
    tables = dynamodb.url_for(place, endpoint)
    intake = f"{sqs.prefix_of(place)}-intake"
    return Settings.load(
        {},
        data=place / role,
        records=tables,
        tasks=tables,
        queue=sqs.url_of(place, endpoint, wait=1),
        coordinator=f"{redis.redis().url}?prefix={sqs.prefix_of(place)}",
        blobs=s3.url_of(place, endpoint, has_own_bucket=True),
        signing_key="s" * 32,
        allow_private_targets=True,
        app="tests.stacks.app",
        fetchers=0,
        ingesters=1,
        handler_processes=0,
        ingest_range_bytes=100_000,
        source_buckets=f"acme=s3://{sources.BUCKET}?region={REGION}&endpoint={endpoint}",
        event_targets=shared_targets().listed("acme", endpoint),
        step_functions=f"stepfunctions://{REGION}?endpoint={endpoint}",
        intake=f"sqs://{REGION}/{intake}?endpoint={endpoint}&wait=1",
        intake_tenant="acme",
        **more,
    )
