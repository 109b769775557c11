"""The monitor as a Lambda, the sample state machine, alarms and the dashboard."""

import json
from pathlib import Path
from typing import Any

from deploy.aws.generate.intrinsics import att, either, ref, sub
from deploy.aws.generate.network import SUBNETS
from deploy.aws.generate.services import task_role, variables
from deploy.aws.generate.stores import TABLES, TABLES_URL

_DEFINITION = Path(__file__).parents[2] / "stepfunctions" / "state-machine.asl.json"
_HANDLER = "conveyor.recover.lambda_handler.handler"
_MINUTE = 60


def _lambda_variables() -> dict[str, Any]:
    named = {name: value for name, value in variables("monitor").items() if name != "AWS_REGION"}
    return {
        **named,
        "CONVEYOR_DATA": "/tmp/conveyor",  # noqa: S108  (the only place that a function may write to)
        "CONVEYOR_TASKS": either(
            "UsesPostgres", sub("{{resolve:secretsmanager:${TasksSecret}:SecretString}}"), TABLES_URL
        ),
        "CONVEYOR_OTHER_TASKS": either("UsesPostgres", TABLES_URL, ""),
        "CONVEYOR_SIGNING_KEY": sub("{{resolve:secretsmanager:${SigningKey}:SecretString}}"),
        "CONVEYOR_COORDINATOR": sub("{{resolve:secretsmanager:${CoordinatorSecret}:SecretString}}"),
    }


def _monitor_role() -> dict[str, Any]:
    role = task_role("monitor", "lambda.amazonaws.com", "MonitorIsLambda")
    managed = "arn:${AWS::Partition}:iam::aws:policy/service-role/AWSLambdaVPCAccessExecutionRole"
    role["Properties"]["ManagedPolicyArns"] = [sub(managed), either("HasKey", ref("KeyPolicy"))]
    return role


MONITOR: dict[str, Any] = {
    "MonitorFunctionRole": _monitor_role(),
    "MonitorFunction": {
        "Type": "AWS::Lambda::Function",
        "Condition": "MonitorIsLambda",
        "Properties": {
            "FunctionName": sub("${Prefix}-monitor"),
            "Runtime": "python3.13",
            "Handler": _HANDLER,
            "Code": {"S3Bucket": ref("MonitorBucket"), "S3Key": ref("MonitorKey")},
            "Role": att("MonitorFunctionRole.Arn"),
            "MemorySize": 512,
            "Timeout": 55,
            "VpcConfig": {"SubnetIds": SUBNETS, "SecurityGroupIds": [ref("TasksGroup")]},
            "Environment": {"Variables": _lambda_variables()},
        },
    },
    "MonitorRule": {
        "Type": "AWS::Events::Rule",
        "Condition": "MonitorIsLambda",
        "Properties": {
            "ScheduleExpression": "rate(1 minute)",
            "Targets": [
                {
                    "Id": "monitor",
                    "Arn": att("MonitorFunction.Arn"),
                    "RetryPolicy": {"MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": _MINUTE},
                }
            ],
        },
    },
    "MonitorPermission": {
        "Type": "AWS::Lambda::Permission",
        "Condition": "MonitorIsLambda",
        "Properties": {
            "Action": "lambda:InvokeFunction",
            "FunctionName": ref("MonitorFunction"),
            "Principal": "events.amazonaws.com",
            "SourceArn": att("MonitorRule.Arn"),
        },
    },
}


def _definition() -> str:
    """The machine of deploy/stepfunctions on one line, for any partition."""
    definition = json.loads(_DEFINITION.read_text().replace("arn:aws:", "arn:${Partition}:"))
    return json.dumps(definition, separators=(",", ":"))


MACHINE: dict[str, Any] = {
    "MachineRole": {
        "Type": "AWS::IAM::Role",
        "Condition": "HasMachine",
        "Properties": {
            "AssumeRolePolicyDocument": {
                "Version": "2012-10-17",
                "Statement": [
                    {"Effect": "Allow", "Principal": {"Service": "states.amazonaws.com"}, "Action": "sts:AssumeRole"}
                ],
            },
            "Policies": [
                {
                    "PolicyName": "send",
                    "PolicyDocument": {
                        "Version": "2012-10-17",
                        "Statement": [
                            {
                                "Effect": "Allow",
                                "Action": "sqs:SendMessage",
                                "Resource": [
                                    att(f"{name}.Arn") for name in ("IntakeQueue", "ReprocessQueue", "MachineDeadQueue")
                                ],
                            }
                        ],
                    },
                }
            ],
        },
    },
    "Machine": {
        "Type": "AWS::StepFunctions::StateMachine",
        "Condition": "HasMachine",
        # The linter knows neither other partitions nor an OutputPath of a Succeed state.
        "Metadata": {"cfn-lint": {"config": {"ignore_checks": ["E3601"]}}},
        "Properties": {
            "StateMachineName": sub("${Prefix}-job"),
            "RoleArn": att("MachineRole.Arn"),
            "DefinitionString": _definition(),
            "DefinitionSubstitutions": {
                "Partition": ref("AWS::Partition"),
                "IntakeQueueUrl": ref("IntakeQueue"),
                "ReprocessQueueUrl": ref("ReprocessQueue"),
                "DeadLetterQueueUrl": ref("MachineDeadQueue"),
            },
        },
    },
}

_DEAD = {"QueueName": att("DeadLetterQueue.QueueName")}
_CONTROL = {"QueueName": att("ControlQueue.QueueName")}


def _alarm(
    description: str,
    namespace: Any,
    metric: str,
    threshold: Any,
    minutes: int,
    dimensions: dict[str, Any] | None = None,
    *,
    below: bool = False,
    missing: str = "notBreaching",
    condition: str = "HasAll",
    statistic: str = "Maximum",
) -> dict[str, Any]:
    return {
        "Type": "AWS::CloudWatch::Alarm",
        "Condition": condition,
        "Properties": {
            "AlarmDescription": description,
            "Namespace": namespace,
            "MetricName": metric,
            "Dimensions": [{"Name": name, "Value": value} for name, value in (dimensions or {}).items()],
            "Statistic": statistic,
            "Period": _MINUTE,
            "EvaluationPeriods": minutes,
            "Threshold": threshold,
            "ComparisonOperator": "LessThanThreshold" if below else "GreaterThanThreshold",
            "TreatMissingData": missing,
            "AlarmActions": [ref("AlarmTopic")],
            "OKActions": [ref("AlarmTopic")],
        },
    }


_TARGETS = {
    "LoadBalancer": att("Balancer.LoadBalancerFullName"),
    "TargetGroup": att("ApiTargets.TargetGroupFullName"),
}

ALARMS: dict[str, Any] = {
    "AlarmTopic": {
        "Type": "AWS::SNS::Topic",
        "Condition": "HasAll",
        "Properties": {"TopicName": sub("${Prefix}-alarms")},
    },
    "AlarmSubscription": {
        "Type": "AWS::SNS::Subscription",
        "Condition": "HasEmail",
        "Properties": {"TopicArn": ref("AlarmTopic"), "Protocol": "email", "Endpoint": ref("AlarmEmail")},
    },
    "DeadLetterAlarm": _alarm(
        "Messages were received a thousand times and set aside: read the log of the workers.",
        "AWS/SQS",
        "ApproximateNumberOfMessagesVisible",
        0,
        1,
        _DEAD,
    ),
    "ControlAlarm": _alarm(
        "Lists wait for ingest for 15 minutes: is the ingest service running?",
        "AWS/SQS",
        "ApproximateAgeOfOldestMessage",
        900,
        5,
        _CONTROL,
    ),
    "WaitingAlarm": _alarm(
        "Work waits for 20 minutes although workers scale: raise WorkerMaximum, or look at the quotas of Fargate.",
        ref("Prefix"),
        "WorkWaitingSeconds",
        1200,
        15,
    ),
    "SamplerAlarm": _alarm(
        "The sweeper has said nothing for 5 minutes.",
        ref("Prefix"),
        "Workers",
        1,
        5,
        below=True,
        missing="breaching",
        statistic="SampleCount",
    ),
    "HealthAlarm": _alarm(
        "An API process does not answer its health check.",
        "AWS/ApplicationELB",
        "UnHealthyHostCount",
        0,
        5,
        _TARGETS,
    ),
    "ErrorAlarm": _alarm(
        "The API answers with server errors.",
        "AWS/ApplicationELB",
        "HTTPCode_Target_5XX_Count",
        10,
        5,
        _TARGETS,
        statistic="Sum",
    ),
    **{
        f"{name}ThrottleAlarm": _alarm(
            "DynamoDB throttles writes for 15 minutes: raise the warm throughput, or the shards of jobs.",
            "AWS/DynamoDB",
            "WriteThrottleEvents",
            1000,
            15,
            {"TableName": sub(f"{TABLES}-{name.lower()}")},
            statistic="Sum",
        )
        for name in ("Records", "Tasks")
    },
    "CacheAlarm": _alarm(
        "The memory of Valkey is nearly full: when it is, no lease is granted.",
        "AWS/ElastiCache",
        "DatabaseMemoryUsagePercentage",
        75,
        5,
        {"CacheClusterId": sub("${Cache}-0001-001"), "CacheNodeId": "0001"},
        condition="MakesCache",
    ),
    "MonitorAlarm": _alarm(
        "The monitor fails: state machines get no heartbeats.",
        "AWS/Lambda",
        "Errors",
        0,
        3,
        {"FunctionName": ref("MonitorFunction")},
        condition="MonitorIsLambda",
        statistic="Sum",
    ),
}


def _widget(title: str, x: int, y: int, *metrics: list[str], stat: str = "Maximum") -> dict[str, Any]:
    return {
        "type": "metric",
        "x": x,
        "y": y,
        "width": 8,
        "height": 6,
        "properties": {
            "title": title,
            "region": "${AWS::Region}",
            "period": _MINUTE,
            "stat": stat,
            "metrics": list(metrics),
        },
    }


def _body() -> str:
    targets = ["LoadBalancer", "${Balancer.LoadBalancerFullName}"]
    tables = [["AWS/DynamoDB", "{}", "TableName", f"{TABLES}-{name}"] for name in ("records", "tasks")]

    def of_tables(*names: str) -> list[list[str]]:
        return [[table[0], name, *table[2:]] for table in tables for name in names]

    widgets = [
        _widget("Waiting work, in seconds", 0, 0, ["${Prefix}", "WorkWaitingSeconds"]),
        _widget("Waiting tasks", 8, 0, ["${Prefix}", "TasksWaiting"]),
        _widget("Workers", 16, 0, ["${Prefix}", "Workers"]),
        _widget(
            "Requests",
            0,
            6,
            ["AWS/ApplicationELB", "RequestCount", *targets],
            ["AWS/ApplicationELB", "HTTPCode_Target_5XX_Count", *targets],
            stat="Sum",
        ),
        _widget("Latency of the API", 8, 6, ["AWS/ApplicationELB", "TargetResponseTime", *targets], stat="p95"),
        _widget(
            "Dead letters and oldest list",
            16,
            6,
            ["AWS/SQS", "ApproximateNumberOfMessagesVisible", "QueueName", "${Prefix}-dead-letters"],
            ["AWS/SQS", "ApproximateAgeOfOldestMessage", "QueueName", "${Prefix}-control"],
        ),
        _widget("Write units", 0, 12, *of_tables("ConsumedWriteCapacityUnits"), stat="Sum"),
        _widget("Read units", 8, 12, *of_tables("ConsumedReadCapacityUnits"), stat="Sum"),
        _widget("Throttled writes", 16, 12, *of_tables("WriteThrottleEvents"), stat="Sum"),
        _widget(
            "CPU of the services, in percent",
            0,
            18,
            *(
                ["AWS/ECS", "CPUUtilization", "ClusterName", "${Prefix}", "ServiceName", f"${{Prefix}}-{role}"]
                for role in ("api", "work", "ingest", "sweep")
            ),
            stat="Average",
        ),
        _widget(
            "Memory of the services, in percent",
            8,
            18,
            *(
                ["AWS/ECS", "MemoryUtilization", "ClusterName", "${Prefix}", "ServiceName", f"${{Prefix}}-{role}"]
                for role in ("api", "work", "ingest", "sweep")
            ),
        ),
        _widget(
            "Memory of Valkey, in percent",
            16,
            18,
            ["AWS/ElastiCache", "DatabaseMemoryUsagePercentage", "CacheClusterId", "${Prefix}-0001-001"],
        ),
    ]
    return json.dumps({"widgets": widgets}, separators=(",", ":"))


DASHBOARD: dict[str, Any] = {
    "Dashboard": {
        "Type": "AWS::CloudWatch::Dashboard",
        "Condition": "HasAll",
        "Properties": {"DashboardName": sub("${Prefix}-${AWS::Region}"), "DashboardBody": sub(_body())},
    }
}
