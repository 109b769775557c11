"""What is wrong with a gateway, or with a pool of them: the one place that checks those of jobs and the operator's."""

from pyreqwest.http import Url

from conveyor.egress.routes import SOCKS, is_socks, parse_proxy
from conveyor.lists.inputs import headers_problem
from conveyor.model import Gateway, Options

MAX_GATEWAY_URL = 8192
MAX_POOL = 50
MAX_WEIGHT = 100


def route_problem(options: Options, operators: Gateway | None, allows_insecure: bool) -> str | None:
    """What keeps a job's requests from leaving, or None: its gateway or the operator's, and whether it may leave
    certificates unverified."""
    gateway = options.gateway or operators
    wrong = None if gateway is None else gateway_problem(gateway)
    return wrong or (insecure_problem(options.gateway, operators, allows_insecure) if options.insecure else None)


def insecure_problem(own: Gateway | None, operators: Gateway | None, is_allowed: bool) -> str | None:
    """Why a job with these gateways, its own and the operator's, may not leave certificates unverified, or None."""
    if not is_allowed:
        return "certificates must be verified here; CONVEYOR_ALLOW_INSECURE allows jobs not to"
    # The client verifies both the proxy, which gets the operator's password, and the targets behind it, or neither.
    used = () if own is not None or operators is None else operators.members
    if any((member.proxy or "").lower().startswith("https:") for member in used):
        return "certificates must be verified behind the https proxy in CONVEYOR_GATEWAY"
    return None


def gateway_problem(gateway: Gateway) -> str | None:
    """What is wrong with a gateway or a pool of them, the operator's or a job's, or None."""
    if not gateway.pool:
        return "`sticky` needs a `pool` of gateways" if gateway.sticky else _single_gateway_problem(gateway)
    if gateway.proxy is not None or gateway.url is not None or gateway.headers:
        return "a gateway with a `pool` has no `proxy`, `url` or `headers` of its own"
    if len(gateway.pool) > MAX_POOL:
        return f"a pool has at most {MAX_POOL} gateways"
    for number, member in enumerate(gateway.pool, start=1):
        wrong = _single_gateway_problem(Gateway(member.proxy, member.url, member.headers))
        if wrong is None and not 1 <= member.weight <= MAX_WEIGHT:
            wrong = f"its weight must be between 1 and {MAX_WEIGHT}"
        if wrong is not None:
            return f"gateway {number} of the pool: {wrong}"
    return None


def _single_gateway_problem(gateway: Gateway) -> str | None:
    if (gateway.proxy is None) == (gateway.url is None):
        return "a gateway has either `proxy` or `url`"
    if len(gateway.proxy or gateway.url or "") > MAX_GATEWAY_URL:
        return f"its URL can have at most {MAX_GATEWAY_URL} characters"
    wrong = _proxy_problem(gateway.proxy) if gateway.proxy is not None else _template_problem(gateway.url or "")
    # Proxy credentials go in a header that is forbidden for targets.
    headers = {name: text for name, text in gateway.headers.items() if name.lower() != "proxy-authorization"}
    if gateway.headers and is_socks(gateway.proxy or ""):
        wrong = wrong or "a SOCKS proxy gets no headers; put user:password@ before its host"
    return wrong or headers_problem(headers if gateway.proxy is not None else gateway.headers)


def _proxy_problem(proxy: str) -> str | None:
    try:
        given, url = Url(proxy), parse_proxy(proxy)
    except ValueError as error:
        return f"the proxy is not a URL: {error}"
    if given.scheme != SOCKS and given.scheme.startswith("socks"):
        return f"{given.scheme}:// is not supported; use {SOCKS}://host:port, with which the proxy resolves names"
    if url.scheme not in {"http", "https"} or not given.host_str or given.port == 0:
        return f"the proxy must be http://host:port, https://host:port or {SOCKS}://host:port"
    return None


def _template_problem(template: str) -> str | None:
    if "{url}" not in template:
        return "the gateway URL must contain {url}"
    try:
        first, second = (Url(template.replace("{url}", text)) for text in ("a", "b"))
    except ValueError as error:
        return f"the gateway is not a URL: {error}"
    if first.scheme not in {"http", "https"} or not first.host_str or first.port == 0:
        return "the gateway must begin with http:// or https://"
    if (first.origin_ascii, first.username, first.password) != (
        second.origin_ascii,
        second.username,
        second.password,
    ):
        return "{url} may be in the path or the query of the gateway, not in its host"
    return None
