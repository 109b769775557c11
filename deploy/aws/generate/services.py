"""The roles on ECS: a task role with the role's own policy, a task definition and a service for each; scaling."""

from typing import Any

from deploy.aws.generate.calls import ROLES, On
from deploy.aws.generate.intrinsics import att, either, ref, sub
from deploy.aws.generate.network import SUBNETS, URL
from deploy.aws.generate.policies import kms_policy, policy
from deploy.aws.generate.stores import KEPT, TABLES, TABLES_URL

# Roles that other roles' parameters size: they do little.
_SIZED_BY = {"schedule": "Sweep", "monitor": "Sweep", "intake": "Sweep", "operator": "Sweep", "work": "Worker"}
_CONDITIONS = {"monitor": "MonitorIsService", "intake": "HasMachine"}
_COUNTS = {
    "api": ref("ApiCount"),
    "work": ref("WorkerMinimum"),
    "ingest": ref("IngestCount"),
    "sweep": ref("SweepCount"),
}
_LISTED = {
    On.STATE_MACHINES: ("HasStateMachines", "StateMachineArns"),
    On.EVENT_BUSES: ("HasEventBuses", "EventBusArns"),
    On.SOURCES: ("HasSources", "SourceObjectArns"),
}
# The names of the policies' placeholders in the template.
_NAMES = {"${TablePrefix}": TABLES, "${QueuePrefix}": "${Prefix}", "${BlobPrefix}": "${Prefix}"}
# Fargate kills a task at most two minutes after SIGTERM: a process that cannot stop in good order exits before.
_STOP_SECONDS, _DRAIN_SECONDS = 120, 110


def _name(role: str) -> str:
    return role.capitalize()


def _assumed_by(service: str) -> dict[str, Any]:
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return {"Version": "2012-10-17", "Statement": [statement]}


def _in_template(statement: dict[str, Any]) -> Any:
    text = statement["Resource"]
    for placeholder, name in _NAMES.items():
        text = text.replace(placeholder, name)
    on = On(statement["Sid"])
    if on in _LISTED:
        condition, parameter = _LISTED[on]
        return either(condition, {**statement, "Resource": ref(parameter)})
    return {**statement, "Resource": sub(text) if "${" in text else text}


def task_role(role: str, service: str = "ecs-tasks.amazonaws.com", condition: str = "HasAll") -> dict[str, Any]:
    """The role of IAM for a role of Conveyor, with the policy that is generated for it."""
    statements = [_in_template(statement) for statement in policy(role)["Statement"]]
    return {
        "Type": "AWS::IAM::Role",
        "Condition": condition,
        "Properties": {
            "AssumeRolePolicyDocument": _assumed_by(service),
            "ManagedPolicyArns": either("HasKey", [ref("KeyPolicy")]),
            "Policies": [{"PolicyName": role, "PolicyDocument": {"Version": "2012-10-17", "Statement": statements}}],
        },
    }


def _key_policy() -> dict[str, Any]:
    document = kms_policy()
    (statement,) = document["Statement"]
    services = [sub(service) for service in statement["Condition"]["StringEquals"]["kms:ViaService"]]
    statement = {
        **statement,
        "Resource": ref("KeyArn"),
        "Condition": {"StringEquals": {"kms:ViaService": services}},
    }
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Condition": "HasKeyPolicy",
        "Properties": {"PolicyDocument": {"Version": "2012-10-17", "Statement": [statement]}},
    }


_SECRETS = {
    "SigningKey": "HasAll",
    "CoordinatorSecret": "HasAll",
    "TasksSecret": "UsesPostgres",
}

EXECUTION_ROLE: dict[str, Any] = {
    "Type": "AWS::IAM::Role",
    "Condition": "HasAll",
    "Properties": {
        "AssumeRolePolicyDocument": _assumed_by("ecs-tasks.amazonaws.com"),
        "ManagedPolicyArns": [
            sub("arn:${AWS::Partition}:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy")
        ],
        "Policies": [
            {
                "PolicyName": "secrets",
                "PolicyDocument": {
                    "Version": "2012-10-17",
                    "Statement": [
                        {
                            "Effect": "Allow",
                            "Action": "secretsmanager:GetSecretValue",
                            "Resource": [
                                ref(name) if condition == "HasAll" else either(condition, ref(name))
                                for name, condition in _SECRETS.items()
                            ],
                        }
                    ],
                },
            }
        ],
    },
}


def variables(role: str) -> dict[str, Any]:
    """The settings of a role, without those that are secrets."""
    common: dict[str, Any] = {
        "AWS_REGION": ref("AWS::Region"),
        "CONVEYOR_RECORDS": TABLES_URL,
        "CONVEYOR_QUEUE": sub("sqs://${AWS::Region}/${Prefix}"),
        "CONVEYOR_BLOBS": sub("s3://${Bucket}/${Prefix}?region=${AWS::Region}"),
        "CONVEYOR_PUBLIC_URL": URL,
        "CONVEYOR_LOG_FORMAT": "json",
        "CONVEYOR_DRAIN_SECONDS": str(_DRAIN_SECONDS),
        "CONVEYOR_EVENT_TARGETS": ref("EventTargets"),
        "CONVEYOR_SOURCE_BUCKETS": ref("SourceBuckets"),
        "CONVEYOR_EXPORT_BUCKETS": ref("ExportBuckets"),
        "CONVEYOR_STEP_FUNCTIONS": either("HasMachine", sub("stepfunctions://${AWS::Region}"), ""),
    }
    own: dict[str, dict[str, Any]] = {
        "api": {"CONVEYOR_TRUSTED_PROXIES": ref("TrustedProxies")},
        "sweep": {"CONVEYOR_CLOUDWATCH_NAMESPACE": ref("Prefix")},
        # It runs only where there is a state machine.
        "intake": {
            "CONVEYOR_STEP_FUNCTIONS": sub("stepfunctions://${AWS::Region}"),
            "CONVEYOR_INTAKE": sub("sqs://${AWS::Region}/${Prefix}-reprocess sqs://${AWS::Region}/${Prefix}-intake"),
            "CONVEYOR_INTAKE_TENANT": ref("IntakeTenant"),
        },
    }
    return common | own.get(role, {})


def _environment(role: str) -> list[Any]:
    listed: list[Any] = [{"Name": name, "Value": value} for name, value in variables(role).items()]
    tables = {"Name": "CONVEYOR_TASKS", "Value": TABLES_URL}
    # Jobs from before the tasks moved to Postgres stay readable.
    other = {"Name": "CONVEYOR_OTHER_TASKS", "Value": tables["Value"]}
    return [*listed, either("UsesPostgres", other, tables)]


def _container(role: str) -> dict[str, Any]:
    secrets: list[Any] = [
        {"Name": "CONVEYOR_SIGNING_KEY", "ValueFrom": ref("SigningKey")},
        {"Name": "CONVEYOR_COORDINATOR", "ValueFrom": ref("CoordinatorSecret")},
        either("UsesPostgres", {"Name": "CONVEYOR_TASKS", "ValueFrom": ref("TasksSecret")}),
    ]
    container: dict[str, Any] = {
        "Name": "conveyor",
        "Image": ref("Image"),
        "Command": ["doctor" if role == "operator" else role],
        "StopTimeout": _STOP_SECONDS,
        "Environment": _environment(role),
        "Secrets": secrets,
        "LogConfiguration": {
            "LogDriver": "awslogs",
            "Options": {
                "awslogs-group": ref("Logs"),
                "awslogs-region": ref("AWS::Region"),
                "awslogs-stream-prefix": role,
            },
        },
    }
    if role == "api":
        container["PortMappings"] = [{"ContainerPort": 8080}]
    if role != "operator":
        container["HealthCheck"] = {
            "Command": ["CMD", "/opt/conveyor/bin/python", "/opt/conveyor/healthcheck.py"],
            "Interval": 15,
            "Timeout": 5,
            "Retries": 4,
            "StartPeriod": 60,
        }
    return container


def _task(role: str) -> dict[str, Any]:
    size = _SIZED_BY.get(role, _name(role))
    return {
        "Type": "AWS::ECS::TaskDefinition",
        "Condition": _CONDITIONS.get(role, "HasAll"),
        "Properties": {
            "Family": sub(f"${{Prefix}}-{role}"),
            "RequiresCompatibilities": ["FARGATE"],
            "NetworkMode": "awsvpc",
            "Cpu": ref(f"{size}Cpu"),
            "Memory": ref(f"{size}Memory"),
            "ExecutionRoleArn": att("ExecutionRole.Arn"),
            "TaskRoleArn": att(f"{_name(role)}Role.Arn"),
            "ContainerDefinitions": [_container(role)],
        },
    }


def _service(role: str) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "ServiceName": sub(f"${{Prefix}}-{role}"),
        "Cluster": ref("Cluster"),
        "TaskDefinition": ref(f"{_name(role)}Task"),
        "DesiredCount": _COUNTS.get(role, 1),
        "CapacityProviderStrategy": [{"CapacityProvider": "FARGATE", "Weight": 1}],
        "DeploymentConfiguration": {
            "DeploymentCircuitBreaker": {"Enable": True, "Rollback": True},
            "MinimumHealthyPercent": 100,
            "MaximumPercent": 200,
        },
        "EnableECSManagedTags": True,
        "PropagateTags": "SERVICE",
        "NetworkConfiguration": {
            "AwsvpcConfiguration": {
                "AssignPublicIp": ref("AssignPublicIp"),
                "Subnets": SUBNETS,
                "SecurityGroups": [ref("TasksGroup")],
            }
        },
    }
    made: dict[str, Any] = {"Type": "AWS::ECS::Service", "Condition": _CONDITIONS.get(role, "HasAll")}
    if role == "work":
        properties["CapacityProviderStrategy"] = [
            {"CapacityProvider": "FARGATE", "Base": ref("WorkerOnDemand"), "Weight": 0},
            {"CapacityProvider": "FARGATE_SPOT", "Weight": 1},
        ]
    if role == "api":
        made["DependsOn"] = "Listener"
        properties["HealthCheckGracePeriodSeconds"] = 60
        properties["LoadBalancers"] = [
            {"ContainerName": "conveyor", "ContainerPort": 8080, "TargetGroupArn": ref("ApiTargets")}
        ]
    return {**made, "Properties": properties}


def _scalable(role: str, least: str, most: str) -> dict[str, Any]:
    return {
        "Type": "AWS::ApplicationAutoScaling::ScalableTarget",
        "Condition": "Scales",
        "Properties": {
            "ServiceNamespace": "ecs",
            "ScalableDimension": "ecs:service:DesiredCount",
            "ResourceId": sub(f"service/${{Cluster}}/${{{_name(role)}Service.Name}}"),
            "MinCapacity": ref(least),
            "MaxCapacity": ref(most),
        },
    }


def _tracking(target: str, name: str, configuration: dict[str, Any]) -> dict[str, Any]:
    return {
        "Type": "AWS::ApplicationAutoScaling::ScalingPolicy",
        "Condition": "Scales",
        "Properties": {
            "PolicyName": sub(f"${{Prefix}}-{name}"),
            "PolicyType": "TargetTrackingScaling",
            "ScalingTargetId": ref(target),
            "TargetTrackingScalingPolicyConfiguration": configuration,
        },
    }


_WAITING = {
    "CustomizedMetricSpecification": {
        "Namespace": ref("Prefix"),
        "MetricName": "WorkWaitingSeconds",
        "Statistic": "Maximum",
        "Unit": "Seconds",
    },
    "TargetValue": ref("WaitingSeconds"),
    "ScaleOutCooldown": 60,
    "ScaleInCooldown": 300,
}
_CPU = {
    "PredefinedMetricSpecification": {"PredefinedMetricType": "ECSServiceAverageCPUUtilization"},
    "TargetValue": 60,
    "ScaleOutCooldown": 60,
    "ScaleInCooldown": 300,
}

_SERVICES = tuple(role for role in ROLES if role != "operator")

COMPUTE: dict[str, Any] = {
    "Logs": {
        "Type": "AWS::Logs::LogGroup",
        "Condition": "HasAll",
        **KEPT,
        "Properties": {"LogGroupName": sub("/conveyor/${Prefix}"), "RetentionInDays": ref("LogDays")},
    },
    "Cluster": {
        "Type": "AWS::ECS::Cluster",
        "Condition": "HasAll",
        "Properties": {"ClusterName": ref("Prefix"), "CapacityProviders": ["FARGATE", "FARGATE_SPOT"]},
    },
    "KeyPolicy": _key_policy(),
    "ExecutionRole": EXECUTION_ROLE,
    **{f"{_name(role)}Role": task_role(role, condition=_CONDITIONS.get(role, "HasAll")) for role in ROLES},
    **{f"{_name(role)}Task": _task(role) for role in ROLES},
    **{f"{_name(role)}Service": _service(role) for role in _SERVICES},
    "WorkTarget": _scalable("work", "WorkerMinimum", "WorkerMaximum"),
    "WorkScaling": _tracking("WorkTarget", "waiting", _WAITING),
    "ApiTarget": _scalable("api", "ApiCount", "ApiMaximum"),
    "ApiScaling": _tracking("ApiTarget", "cpu", _CPU),
}
