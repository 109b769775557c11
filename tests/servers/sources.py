"""A bucket of a tenant on the emulator of tests/servers/aws.py, from which the server reads lists."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
from botocore.exceptions import ClientError

from tests.servers.aws import REGION, aws

BUCKET = "tenant-lists"


def listed(tenant: str, prefix: str = "", bucket: str = BUCKET) -> str:
    """The entry of CONVEYOR_SOURCE_BUCKETS."""
    return f"{tenant}=s3://{bucket}/{prefix}?region={REGION}&endpoint={aws()}"


def put(key: str, data: bytes) -> str:
    """Store a list; its URL."""
    _client(aws()).put_object(Bucket=BUCKET, Key=key, Body=data)
    return f"s3://{BUCKET}/{key}"


def google_account(place: Path) -> str:
    """A file for GOOGLE_SERVICE_ACCOUNT: the emulator's S3 answers the requests for Google Cloud Storage, too."""
    account = {"gcs_base_url": aws(), "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    path = place / "account.json"
    path.write_text(json.dumps(account))
    return str(path)


@cache
def _client(endpoint: str) -> Any:
    client: Any = botocore.session.get_session().create_client("s3", region_name=REGION, endpoint_url=endpoint)
    try:
        client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    except ClientError as error:
        if error.response["Error"]["Code"] not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
            raise
    return client
