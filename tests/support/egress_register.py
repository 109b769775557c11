"""The register of what connects: each module of the source that can open a connection, with the paths (egress_paths.py)
that go through it, or the reason why no tenant's URL does. A test compares it with the imports of the source.
"""

_OPERATOR = "the operator's settings name the server"
_EGRESS = "makes no request by itself: the paths do"
_HANDS_ON = "hands a guard or a reader on"

# Module, or package with all below it -> the first words of the names of its paths, or the reason why it has none.
MODULES: dict[str, tuple[str, ...] | str] = {
    "accept.scheduler": _HANDS_ON,
    "accept.sources": ("list of a schedule",),
    "egress.ca_bundle": "builds a client to check certificates, and sends nothing",
    "egress.clients": _EGRESS,
    "egress.heads": _EGRESS,
    "egress.outbound": ("webhook", "list"),
    "egress.robots": ("fetch, robots.txt", "download, robots.txt"),
    "egress.routes": _EGRESS,
    "embedded": _HANDS_ON,
    "engines.aws_credentials": "asks the machine that it runs on for credentials",
    "engines.aws_event_targets": "a tenant names an ARN that the operator lists; the endpoint is the operator's",
    "engines.aws_session": _OPERATOR,
    "engines.dynamodb": _OPERATOR,
    "engines.object_blobs": _OPERATOR,
    "engines.postgres": _OPERATOR,
    "engines.redis": _OPERATOR,
    "engines.s3": _OPERATOR,
    "engines.s3_parts": _OPERATOR,
    "engines.s3_source_buckets": "a tenant names an object in a bucket that the operator lists, with its endpoint",
    "engines.sqs": _OPERATOR,
    "engines.step_functions_client": _OPERATOR,
    "export.export_copier": "a tenant names a place below one that the operator lists, with its endpoint",
    "lists.list_files": _HANDS_ON,
    "lists.list_bytes": _HANDS_ON,
    "lists.url_lists": ("list of a job", "list of a schedule"),
    "notify.deliverer": ("webhook",),
    "process.executors.download.download_executor": ("download",),
    "process.executors.download.exchange": ("download", "export API"),
    "process.executors.download.export_api_executor": ("export API",),
    "process.executors.download.long_tasks": _HANDS_ON,
    "process.executors.fetch.child": ("fetch",),
    "process.executors.fetch.fetch_executor": ("fetch",),
}
