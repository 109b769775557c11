"""What is hidden wherever jobs, tasks, schedules and webhook endpoints are shown: by the API, in exports, on the
dashboard. What is stored stays as it is, so that fetches, deliveries and reruns use it."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from conveyor.telemetry.redact import is_secret_name

HIDDEN = "[hidden]"

_USER = re.compile(r"(?<=//)[^/?#\s]*@")


def shown_url(url: str) -> str:
    """The URL without its user info and the values of its query."""
    address, mark, query = _USER.sub(f"{HIDDEN}@", url).partition("?")
    pairs = [pair.partition("=") for pair in query.split("&")]
    # A part of the query without a name is a value itself.
    shown = "&".join(f"{name}={HIDDEN}" if equals else HIDDEN for name, equals, _ in pairs)
    return f"{address}{mark}{shown if query else ''}"


def shown_input(raw: msgspec.Raw) -> msgspec.Raw:
    """The input of a task without the values of headers whose names mark a secret. Only an object with a `url` has
    headers: the input of a handler is the user's own."""
    text = bytes(raw)
    if b'"headers"' not in text or not text.startswith(b"{"):
        return raw
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return raw
    return msgspec.Raw(msgspec.json.encode(_shown_task(value)))


def _shown_task(value: Any) -> Any:
    headers = value.get("headers") if isinstance(value, dict) else None
    if not isinstance(headers, dict) or "url" not in value:
        return value
    shown = {name: HIDDEN if is_secret_name(name) else text for name, text in headers.items()}
    return {**value, "headers": shown}


def shown_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without the values of headers, gateways and bodies, and without those in the queries of URLs."""
    shown: dict[str, Any] = {}
    for name, value in options.items():
        if name == "headers" and isinstance(value, Mapping):
            shown[name] = dict.fromkeys(value, HIDDEN)
        elif name == "body" and value is not None:
            # The body of a call to an export API.
            shown[name] = HIDDEN
        elif name == "gateway" and isinstance(value, Mapping):
            shown[name] = _shown_gateway(value)
        elif name == "url" and isinstance(value, str):
            shown[name] = shown_url(value)
        else:
            shown[name] = shown_options(value) if isinstance(value, Mapping) else value
    return shown


def _shown_gateway(gateway: Mapping[str, Any]) -> dict[str, Any]:
    """A gateway without its values, and the weights of a pool."""
    shown: dict[str, Any] = {field: HIDDEN for field, text in gateway.items() if text}
    if isinstance(gateway.get("pool"), list | tuple) and gateway["pool"]:
        shown["pool"] = [
            {field: text if field == "weight" else HIDDEN for field, text in member.items() if text}
            for member in gateway["pool"]
        ]
    if gateway.get("sticky"):
        shown["sticky"] = gateway["sticky"]
    return shown


def shown_job(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The job of a schedule, as its options are shown: with its source, its receivers and its tasks."""
    shown = shown_options(spec)
    if spec.get("notify"):
        shown["notify"] = [shown_options(entry) for entry in spec["notify"]]
    if spec.get("tasks"):
        shown["tasks"] = [_shown_task(task) for task in spec["tasks"]]
    return shown
