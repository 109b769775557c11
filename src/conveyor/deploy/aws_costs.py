"""What a stack costs: idle for a month, and for a million tasks. Arithmetic on public prices, without transfer and
logs."""

from collections.abc import Mapping
from typing import NamedTuple

from conveyor.deploy.aws_prices import (
    ALARM,
    AURORA_UNIT,
    DASHBOARD,
    FARGATE_GB,
    FARGATE_VCPU,
    HOURS_A_MONTH,
    IDLE_POLLS,
    IDLE_READ_UNITS,
    INTERFACE_ENDPOINT,
    LOAD_BALANCER,
    METRIC,
    MILLION_TASKS,
    MILLION_WORKER_HOURS,
    PRICES,
    PUBLIC_ADDRESS,
    SECRET,
    SPOT_SHARE,
    VALKEY_NODES,
)
from conveyor.deploy.aws_stack import made_resources

_SECONDS_A_MONTH = HOURS_A_MONTH * 3600
_METRICS = 3
_ZONES = 2


class CostLine(NamedTuple):
    """One row: what is made, and dollars."""

    what: str
    dollars: float


def idle_month(parameters: Mapping[str, str]) -> list[CostLine]:
    """What a stack costs in a month in which nothing runs, with as few workers as it keeps."""
    if parameters["Parts"] != "all":
        return [CostLine("tables, queues and bucket, which are billed by use", 0.0)]
    made = made_resources(parameters)
    alarms, secrets = made["AWS::CloudWatch::Alarm"], made["AWS::SecretsManager::Secret"]
    lines = [
        _tasks("API", parameters, "Api", "ApiCount"),
        _workers(parameters),
        _tasks("ingest", parameters, "Ingest", "IngestCount"),
        _tasks("sweep", parameters, "Sweep", "SweepCount"),
        _housekeepers(parameters),
        _cache(parameters),
        CostLine("load balancer", (LOAD_BALANCER + _ZONES * PUBLIC_ADDRESS) * HOURS_A_MONTH),
        CostLine("polls of empty queues, reads of idle roles", _polls(parameters)),
        CostLine(
            "alarms, metrics, dashboard, secrets",
            alarms * ALARM + _METRICS * METRIC + DASHBOARD + secrets * SECRET,
        ),
    ]
    if parameters["TasksOnPostgres"] == "yes":
        units = float(parameters["PostgresMinimum"])
        lines.append(CostLine(f"Aurora Postgres, {units:g} units", units * AURORA_UNIT * HOURS_A_MONTH))
    if endpoints := _endpoints(parameters):
        dollars = endpoints * _ZONES * INTERFACE_ENDPOINT * HOURS_A_MONTH
        lines.append(CostLine(f"{endpoints} interface endpoints", dollars))
    return lines


def million_tasks(parameters: Mapping[str, str]) -> list[CostLine]:
    """What a million fetched pages of half a second cost beyond that, to the end of their life."""
    storage = [CostLine(what, dollars) for what, dollars in MILLION_TASKS.items()]
    if parameters["Parts"] != "all":
        return storage
    worker = _hour(parameters, "Worker") * SPOT_SHARE
    return [
        *storage,
        CostLine("workers on Spot, 100 slots each", worker * MILLION_WORKER_HOURS),
    ]


def _hour(parameters: Mapping[str, str], role: str) -> float:
    cores, gigabytes = int(parameters[f"{role}Cpu"]) / 1024, int(parameters[f"{role}Memory"]) / 1024
    return cores * FARGATE_VCPU + gigabytes * FARGATE_GB


def _tasks(what: str, parameters: Mapping[str, str], role: str, count: str) -> CostLine:
    number = int(parameters[count])
    return CostLine(f"{number} x {what}", number * (_hour(parameters, role) + PUBLIC_ADDRESS) * HOURS_A_MONTH)


def _housekeepers(parameters: Mapping[str, str]) -> CostLine:
    """The scheduler, the monitor unless it is a Lambda, and the intake if there is one; each as large as a sweeper."""
    roles = ["schedule"]
    if not parameters["MonitorBucket"]:
        roles.append("monitor")
    if parameters["StepFunctions"] == "yes":
        roles.append("intake")
    hour = _hour(parameters, "Sweep") + PUBLIC_ADDRESS
    return CostLine(", ".join(roles), len(roles) * hour * HOURS_A_MONTH)


def _workers(parameters: Mapping[str, str]) -> CostLine:
    number = int(parameters["WorkerMinimum"])
    on_demand = min(number, int(parameters["WorkerOnDemand"]))
    shares = on_demand + (number - on_demand) * SPOT_SHARE
    dollars = (shares * _hour(parameters, "Worker") + number * PUBLIC_ADDRESS) * HOURS_A_MONTH
    return CostLine(f"{number} x worker, {number - on_demand} on Spot", dollars)


def _cache(parameters: Mapping[str, str]) -> CostLine:
    if parameters["CoordinatorUrl"]:
        return CostLine("Valkey: yours", 0.0)
    kind = parameters["CacheNodeType"]
    nodes = int(parameters["CacheShards"]) * (1 + int(parameters["CacheReplicas"]))
    if kind not in VALKEY_NODES:
        return CostLine(f"{nodes} x {kind}: price unknown", 0.0)
    return CostLine(f"{nodes} x {kind}", nodes * VALKEY_NODES[kind] * HOURS_A_MONTH)


def _polls(parameters: Mapping[str, str]) -> float:
    reads = IDLE_READ_UNITS * _SECONDS_A_MONTH * PRICES["dynamodb read unit"] / 1e6
    polls = int(parameters["IngestCount"]) * IDLE_POLLS * _SECONDS_A_MONTH * PRICES["sqs request"] / 1e6
    return reads + polls


def _endpoints(parameters: Mapping[str, str]) -> int:
    if parameters["VpcId"]:
        return 0
    if parameters["InterfaceEndpoints"] == "yes":
        return 6
    return 2 if parameters["MonitorBucket"] else 0
