"""The parameters of the template, its conditions, and the values of the three sizes."""

from typing import Any

from deploy.aws.generate.intrinsics import Intrinsic, any_of, equals, every, holds, is_not, ref

_YES_NO = ["yes", "no"]


def _text(description: str, default: str | None = "", **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"Type": "String", "Description": description}
    if default is not None:
        made["Default"] = default
    return {**made, **more}


def _number(description: str, default: float, least: float = 0) -> dict[str, Any]:
    return {"Type": "Number", "Description": description, "Default": default, "MinValue": least}


def _choice(description: str, default: str) -> dict[str, Any]:
    return _text(description, default, AllowedValues=_YES_NO)


def _list(description: str) -> dict[str, Any]:
    return {"Type": "CommaDelimitedList", "Description": description, "Default": ""}


PARAMETERS: dict[str, Any] = {
    "Prefix": _text(
        "Beginning of the names of tables, queues and keys",
        "conveyor",
        AllowedPattern="[a-z][a-z0-9-]{1,28}[a-z0-9]",
    ),
    "Parts": _text(
        "all, or storage: only tables, queues and bucket, for roles that run elsewhere",
        "all",
        AllowedValues=["all", "storage"],
    ),
    "Restored": _text(
        "After a restore to a point in time: -r1 for the tables PREFIX-r1-records and PREFIX-r1-tasks, which exist",
        AllowedPattern="|-[a-z0-9-]{1,20}",
    ),
    "Image": _text("Image of Conveyor in a registry that ECS can pull from"),
    "PublicUrl": _text("Address that users open, such as https://conveyor.example.com"),
    "CertificateArn": _text("Certificate of ACM for the load balancer; without one it speaks HTTP"),
    "AllowedCidr": _text("Addresses that may reach the load balancer, such as 203.0.113.0/24", "127.0.0.1/32"),
    "VpcId": _text("A VPC that exists; without one the template makes one"),
    "SubnetIds": _list("With VpcId: subnets of the tasks and the stores"),
    "LoadBalancerSubnetIds": _list("With VpcId: subnets of the load balancer"),
    "LoadBalancerScheme": _text(
        "Whether the load balancer has public addresses",
        "internet-facing",
        AllowedValues=["internet-facing", "internal"],
    ),
    "AssignPublicIp": _text("Tasks need it in subnets without NAT", "ENABLED", AllowedValues=["ENABLED", "DISABLED"]),
    "TrustedProxies": _text("Network of the load balancer, whose X-Forwarded headers count", "10.42.0.0/16"),
    "InterfaceEndpoints": _choice("Reach SQS, Step Functions, ECR, logs and secrets inside the VPC", "no"),
    "ApiCount": _number("API processes, at least", 2, 1),
    "ApiMaximum": _number("API processes, at most", 4, 1),
    "ApiCpu": _number("CPU units of an API process", 512, 256),
    "ApiMemory": _number("MiB of an API process", 1024, 512),
    "WorkerMinimum": _number("Workers, at least", 1),
    "WorkerMaximum": _number("Workers, at most", 4, 1),
    "WorkerOnDemand": _number("Workers on demand, before those on Spot", 0),
    "WorkerCpu": _number("CPU units of a worker", 1024, 256),
    "WorkerMemory": _number("MiB of a worker", 2048, 512),
    "IngestCount": _number("Ingest processes", 1, 1),
    "IngestCpu": _number("CPU units of an ingest process", 512, 256),
    "IngestMemory": _number("MiB of an ingest process", 1024, 512),
    "SweepCount": _number("Sweep processes", 1, 1),
    "SweepCpu": _number("CPU units of a sweep process", 512, 256),
    "SweepMemory": _number("MiB of a sweep process", 1024, 512),
    "Scaling": _choice("Scale workers by the work that waits, and the API by its CPU", "yes"),
    "WaitingSeconds": _number("How long a task may wait for a worker, in seconds", 60, 1),
    "CoordinatorUrl": _text("A Redis or Valkey that exists; without one the template makes one", "", NoEcho=True),
    "CacheNodeType": _text("Node type of Valkey", "cache.t4g.small"),
    "CacheShards": _number("Shards of Valkey", 1, 1),
    "CacheReplicas": _number("Replicas of each shard", 0),
    "TasksOnPostgres": _choice("Keep tasks on Aurora Postgres Serverless", "no"),
    "PostgresMinimum": _number("Capacity units of Aurora, at least", 0.5),
    "PostgresMaximum": _number("Capacity units of Aurora, at most", 8, 1),
    "StepFunctions": _choice("Make the sample state machine and its queues", "no"),
    "IntakeTenant": _text("Tenant of the jobs of the state machine", "local"),
    "MonitorBucket": _text("Bucket with the zip file of the monitor for Lambda; without one it is a service"),
    "MonitorKey": _text("Key of that zip file"),
    "KeyArn": _text("Key of KMS for tables and bucket; without one the keys are those of AWS"),
    "EventTargets": _text("CONVEYOR_EVENT_TARGETS: TENANT=ARN, separated by spaces"),
    "StateMachineArns": _list("The state machines among the event targets"),
    "EventBusArns": _list("The event buses among the event targets"),
    "SourceBuckets": _text("CONVEYOR_SOURCE_BUCKETS: TENANT=s3://BUCKET/PREFIX, separated by spaces"),
    "SourceObjectArns": _list("The objects of the source buckets: arn:aws:s3:::BUCKET/*"),
    "ExportBuckets": _text("CONVEYOR_EXPORT_BUCKETS: TENANT=s3://BUCKET/PREFIX/, separated by spaces"),
    "AlarmEmail": _text("Who is told of alarms"),
    "LogDays": {
        **_number("How long to keep logs, in days", 30, 1),
        "AllowedValues": [1, 3, 7, 14, 30, 60, 90, 180, 365],
    },
}


def _is_given(parameter: str) -> Intrinsic:
    """Whether a list is not empty."""
    return is_not(Intrinsic("!Equals", [Intrinsic("!Join", ["", ref(parameter)]), ""]))


CONDITIONS: dict[str, Any] = {
    "HasAll": equals("Parts", "all"),
    "MakesTables": equals("Restored", ""),
    "HasPublicUrl": is_not(equals("PublicUrl", "")),
    "HasCertificate": every(holds("HasAll"), is_not(equals("CertificateArn", ""))),
    "MakesVpc": every(holds("HasAll"), equals("VpcId", "")),
    "MakesCache": every(holds("HasAll"), equals("CoordinatorUrl", "")),
    "HasReplicas": is_not(equals("CacheReplicas", "0")),
    "Scales": every(holds("HasAll"), equals("Scaling", "yes")),
    "UsesPostgres": every(holds("HasAll"), equals("TasksOnPostgres", "yes")),
    "HasMachine": every(holds("HasAll"), equals("StepFunctions", "yes")),
    "MonitorIsLambda": every(holds("HasAll"), is_not(equals("MonitorBucket", ""))),
    "MonitorIsService": every(holds("HasAll"), equals("MonitorBucket", "")),
    "WantsEndpoints": every(holds("MakesVpc"), equals("InterfaceEndpoints", "yes")),
    "NeedsEndpoints": every(holds("MakesVpc"), any_of(holds("MonitorIsLambda"), equals("InterfaceEndpoints", "yes"))),
    "HasKey": is_not(equals("KeyArn", "")),
    "HasKeyPolicy": every(holds("HasAll"), is_not(equals("KeyArn", ""))),
    "HasStateMachines": _is_given("StateMachineArns"),
    "HasEventBuses": _is_given("EventBusArns"),
    "HasSources": _is_given("SourceObjectArns"),
    "HasEmail": every(holds("HasAll"), is_not(equals("AlarmEmail", ""))),
}

SIZES: dict[str, dict[str, str]] = {
    "small": {
        "ApiCount": "1",
        "ApiMaximum": "2",
        "ApiCpu": "256",
        "ApiMemory": "1024",
        "WorkerMinimum": "1",
        "WorkerMaximum": "4",
        "WorkerOnDemand": "0",
        "WorkerCpu": "512",
        "WorkerMemory": "2048",
        "IngestCount": "1",
        "IngestCpu": "256",
        "IngestMemory": "1024",
        "SweepCount": "1",
        "SweepCpu": "256",
        "SweepMemory": "1024",
        "CacheNodeType": "cache.t4g.small",
        "CacheShards": "1",
        "CacheReplicas": "0",
    },
    "medium": {
        "ApiCount": "2",
        "ApiMaximum": "6",
        "ApiCpu": "512",
        "ApiMemory": "1024",
        "WorkerMinimum": "2",
        "WorkerMaximum": "20",
        "WorkerOnDemand": "1",
        "WorkerCpu": "1024",
        "WorkerMemory": "2048",
        "IngestCount": "2",
        "IngestCpu": "1024",
        "IngestMemory": "2048",
        "SweepCount": "2",
        "SweepCpu": "512",
        "SweepMemory": "1024",
        "CacheNodeType": "cache.m7g.large",
        "CacheShards": "1",
        "CacheReplicas": "1",
    },
    "large": {
        "ApiCount": "3",
        "ApiMaximum": "20",
        "ApiCpu": "1024",
        "ApiMemory": "2048",
        "WorkerMinimum": "4",
        "WorkerMaximum": "100",
        "WorkerOnDemand": "2",
        "WorkerCpu": "2048",
        "WorkerMemory": "4096",
        "IngestCount": "4",
        "IngestCpu": "1024",
        "IngestMemory": "2048",
        "SweepCount": "3",
        "SweepCpu": "1024",
        "SweepMemory": "2048",
        "CacheNodeType": "cache.r7g.large",
        "CacheShards": "3",
        "CacheReplicas": "1",
    },
}


def size_file(size: str) -> list[dict[str, str]]:
    """The values of a size, in the form that the AWS CLI takes."""
    return [{"ParameterKey": key, "ParameterValue": value} for key, value in SIZES[size].items()]
