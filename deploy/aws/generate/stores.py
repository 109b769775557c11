"""What keeps the data: tables, queues and bucket, exactly as the engines expect them; Valkey; Aurora Postgres."""

from typing import Any

from conveyor.engines.dynamodb.schema import INDEXES, TTL, create_payload
from conveyor.engines.s3 import ABANDONED_DAYS
from conveyor.engines.sqs.queues import KEEP_DEAD_SECONDS, KEEP_SECONDS, MAX_RECEIVES
from deploy.aws.generate.intrinsics import att, either, ref, sub

# The beginning of the tables' names: those that the template makes, or those that were restored.
TABLES = "${Prefix}${Restored}"
TABLES_URL = sub(f"dynamodb://${{AWS::Region}}/{TABLES}")

# Kept when the stack is deleted, but not when its creation fails: the names would be in the way of the next one.
KEPT = {"DeletionPolicy": "RetainExceptOnCreate", "UpdateReplacePolicy": "Retain"}


def _table(suffix: str, indexes: dict[str, Any]) -> dict[str, Any]:
    name = sub(f"${{Prefix}}-{suffix}")
    payload = create_payload("", indexes)
    return {
        "Type": "AWS::DynamoDB::Table",
        "Condition": "MakesTables",
        **KEPT,
        "Properties": {
            **payload,
            "TableName": name,
            "TimeToLiveSpecification": {"AttributeName": TTL, "Enabled": True},
            "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": True},
            "SSESpecification": either(
                "HasKey", {"SSEEnabled": True, "SSEType": "KMS", "KMSMasterKeyId": ref("KeyArn")}
            ),
        },
    }


def _queue(suffix: str, seconds: int, dead: str | None = None, condition: str | None = None) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "QueueName": sub(f"${{Prefix}}-{suffix}"),
        "MessageRetentionPeriod": seconds,
        "SqsManagedSseEnabled": True,
    }
    if dead is not None:
        properties["RedrivePolicy"] = {"deadLetterTargetArn": att(f"{dead}.Arn"), "maxReceiveCount": MAX_RECEIVES}
    made: dict[str, Any] = {"Type": "AWS::SQS::Queue", "Properties": properties}
    return made if condition is None else {"Type": made["Type"], "Condition": condition, "Properties": properties}


def _bucket() -> dict[str, Any]:
    encryption = either(
        "HasKey",
        {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": ref("KeyArn")},
        {"SSEAlgorithm": "AES256"},
    )
    rule = {
        "Id": sub("conveyor-${Prefix}-abandoned"),
        "Status": "Enabled",
        "Prefix": sub("${Prefix}/"),
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": ABANDONED_DAYS},
    }
    cors = {
        "AllowedMethods": ["GET", "PUT"],
        "AllowedHeaders": ["*"],
        "AllowedOrigins": [either("HasPublicUrl", ref("PublicUrl"), "*")],
        "ExposedHeaders": ["ETag"],
        "MaxAge": 3600,
    }
    return {
        "Type": "AWS::S3::Bucket",
        **KEPT,
        "Properties": {
            "BucketName": sub("${Prefix}-${AWS::AccountId}-${AWS::Region}"),
            "BucketEncryption": {
                "ServerSideEncryptionConfiguration": [
                    {"BucketKeyEnabled": True, "ServerSideEncryptionByDefault": encryption}
                ]
            },
            "PublicAccessBlockConfiguration": dict.fromkeys(
                ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"), True
            ),
            "LifecycleConfiguration": {"Rules": [rule]},
            "CorsConfiguration": {"CorsRules": [cors]},
        },
    }


def _tls_only() -> dict[str, Any]:
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [att("Bucket.Arn"), sub("${Bucket.Arn}/*")],
        "Condition": {"Bool": {"aws:SecureTransport": False}},
    }
    return {
        "Type": "AWS::S3::BucketPolicy",
        "Properties": {
            "Bucket": ref("Bucket"),
            "PolicyDocument": {"Version": "2012-10-17", "Statement": [statement]},
        },
    }


STORAGE: dict[str, Any] = {
    "RecordsTable": _table("records", INDEXES),
    "TasksTable": _table("tasks", {}),
    "DeadLetterQueue": _queue("dead-letters", KEEP_DEAD_SECONDS),
    "ControlQueue": _queue("control", KEEP_SECONDS, "DeadLetterQueue"),
    "Bucket": _bucket(),
    "BucketPolicy": _tls_only(),
}


def _secret(description: str, condition: str, length: int = 48) -> dict[str, Any]:
    return {
        "Type": "AWS::SecretsManager::Secret",
        "Condition": condition,
        "Properties": {
            "Description": description,
            "GenerateSecretString": {"PasswordLength": length, "ExcludePunctuation": True},
        },
    }


def _url_secret(description: str, condition: str, url: Any) -> dict[str, Any]:
    return {
        "Type": "AWS::SecretsManager::Secret",
        "Condition": condition,
        "Properties": {"Description": description, "SecretString": url},
    }


_CACHE_URL = (
    "rediss+cluster://:{{resolve:secretsmanager:${CachePassword}:SecretString}}"
    "@${Cache.ConfigurationEndPoint.Address}:${Cache.ConfigurationEndPoint.Port}?prefix=" + TABLES
)
_POSTGRES_URL = (
    "postgres://conveyor:{{resolve:secretsmanager:${PostgresPassword}:SecretString}}"
    "@${Postgres.Endpoint.Address}:${Postgres.Endpoint.Port}/conveyor?sslmode=require"
)

SECRETS: dict[str, Any] = {
    # Links, task tokens and the secrets of webhooks in the tables are of no use without it.
    "SigningKey": {**_secret("CONVEYOR_SIGNING_KEY", "HasAll", 64), **KEPT},
    "CachePassword": _secret("Password of Valkey", "MakesCache"),
    "CoordinatorSecret": _url_secret(
        "CONVEYOR_COORDINATOR", "HasAll", either("MakesCache", sub(_CACHE_URL), ref("CoordinatorUrl"))
    ),
    "PostgresPassword": _secret("Password of Postgres", "UsesPostgres"),
    "TasksSecret": _url_secret("CONVEYOR_TASKS", "UsesPostgres", sub(_POSTGRES_URL)),
}

CACHE: dict[str, Any] = {
    "CacheSubnets": {
        "Type": "AWS::ElastiCache::SubnetGroup",
        "Condition": "MakesCache",
        "Properties": {
            "Description": sub("${AWS::StackName}"),
            "SubnetIds": either("MakesVpc", [ref("SubnetA"), ref("SubnetB")], ref("SubnetIds")),
        },
    },
    "CacheParameters": {
        "Type": "AWS::ElastiCache::ParameterGroup",
        "Condition": "MakesCache",
        "Properties": {
            "CacheParameterGroupFamily": "valkey8",
            "Description": "Leases are never evicted",
            "Properties": {"cluster-enabled": "yes", "maxmemory-policy": "noeviction"},
        },
    },
    "Cache": {
        "Type": "AWS::ElastiCache::ReplicationGroup",
        "Condition": "MakesCache",
        "UpdateReplacePolicy": "Delete",
        "DeletionPolicy": "Delete",
        "Properties": {
            "ReplicationGroupId": ref("Prefix"),
            "ReplicationGroupDescription": "Leases, limits and the ready index of Conveyor",
            "Engine": "valkey",
            "EngineVersion": "8.0",
            "CacheNodeType": ref("CacheNodeType"),
            "CacheParameterGroupName": ref("CacheParameters"),
            "CacheSubnetGroupName": ref("CacheSubnets"),
            "SecurityGroupIds": [ref("StoresGroup")],
            "NumNodeGroups": ref("CacheShards"),
            "ReplicasPerNodeGroup": ref("CacheReplicas"),
            "AutomaticFailoverEnabled": True,
            "MultiAZEnabled": either("HasReplicas", True, False),
            "AtRestEncryptionEnabled": True,
            "TransitEncryptionEnabled": True,
            "AuthToken": sub("{{resolve:secretsmanager:${CachePassword}:SecretString}}"),
            "Port": 6379,
        },
    },
}

POSTGRES: dict[str, Any] = {
    "PostgresSubnets": {
        "Type": "AWS::RDS::DBSubnetGroup",
        "Condition": "UsesPostgres",
        "Properties": {
            "DBSubnetGroupDescription": sub("${AWS::StackName}"),
            "SubnetIds": either("MakesVpc", [ref("SubnetA"), ref("SubnetB")], ref("SubnetIds")),
        },
    },
    "Postgres": {
        "Type": "AWS::RDS::DBCluster",
        "Condition": "UsesPostgres",
        "DeletionPolicy": "Snapshot",
        "UpdateReplacePolicy": "Snapshot",
        "Properties": {
            "Engine": "aurora-postgresql",
            "DatabaseName": "conveyor",
            "MasterUsername": "conveyor",
            "MasterUserPassword": sub("{{resolve:secretsmanager:${PostgresPassword}:SecretString}}"),
            "DBSubnetGroupName": ref("PostgresSubnets"),
            "VpcSecurityGroupIds": [ref("StoresGroup")],
            "StorageEncrypted": True,
            "KmsKeyId": either("HasKey", ref("KeyArn")),
            "BackupRetentionPeriod": 14,
            "ServerlessV2ScalingConfiguration": {
                "MinCapacity": ref("PostgresMinimum"),
                "MaxCapacity": ref("PostgresMaximum"),
            },
        },
    },
    "PostgresInstance": {
        "Type": "AWS::RDS::DBInstance",
        "Condition": "UsesPostgres",
        "Properties": {
            "Engine": "aurora-postgresql",
            "DBInstanceClass": "db.serverless",
            "DBClusterIdentifier": ref("Postgres"),
            "PubliclyAccessible": False,
        },
    },
}

INTAKE: dict[str, Any] = {
    "IntakeDeadQueue": _queue("intake-dead-letters", KEEP_DEAD_SECONDS, condition="HasMachine"),
    "IntakeQueue": _queue("intake", KEEP_SECONDS, "IntakeDeadQueue", "HasMachine"),
    "ReprocessQueue": _queue("reprocess", KEEP_SECONDS, "IntakeDeadQueue", "HasMachine"),
    "MachineDeadQueue": _queue("machine-dead-letters", KEEP_DEAD_SECONDS, condition="HasMachine"),
}
