"""Which modules of the source can open a connection to another machine: those that import an HTTP client or a driver,
or what is made of one, or that open sockets."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "conveyor"

# Libraries that connect.
_LIBRARIES = (
    *(
        "aiobotocore",
        "aiodynamo",
        "aiohttp",
        "asyncpg",
        "boto3",
        "botocore",
        "ftplib",
        "http.client",
        "httpx",
        "imaplib",
    ),
    *(
        "obstore",
        "poplib",
        "pyreqwest.client",
        "redis",
        "requests",
        "smtplib",
        "urllib.request",
        "urllib3",
        "websockets",
    ),
)
# Names of Conveyor that connect, or lead there.
_OWN = frozenset({"Clients", "Outbound", "TargetGuard", "UrlLists", "open_object", "open_prefix", "route_of"})
_CALLS = frozenset({"open_connection", "create_connection", "sock_connect", "open_unix_connection"})


def connecting_modules() -> set[str]:
    """Their names below `conveyor`, without the client's, which runs with its user, and without the commands."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        if name.split(".")[0] not in ("client", "cli", "demo") and _connects(ast.parse(path.read_text())):
            found.add(name)
    return found


def _connects(tree: ast.Module) -> bool:
    return any(_is_import(node) or _is_call(node) for node in ast.walk(tree))


def _is_import(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(_is_library(alias.name) for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        is_own = node.module.startswith("conveyor.") and any(alias.name in _OWN for alias in node.names)
        return is_own or _is_library(node.module)
    return False


def _is_library(module: str) -> bool:
    return any(module == library or module.startswith(f"{library}.") for library in _LIBRARIES)


def _is_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    # Both ends of a socket pair are this program's own.
    return name in _CALLS and not any(keyword.arg == "sock" for keyword in node.keywords)
