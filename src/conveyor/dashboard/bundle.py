"""Joins the modules of the dashboard into one file, so that a page is one request and not fifty, six at a time.

Gets the sources by path, returns one module: each source in a function of its own, in the order of their imports, that
returns what it exports. It knows only the forms that the sources use: named imports, exports in front of declarations,
no cycles; a test runs every page from it.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping

_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class)\b[ *]*(\w+))", re.MULTILINE)
_NOTHING = re.compile(r"^export \{\};\n", re.MULTILINE)
# Types and descriptions, which take a third of the space. They begin a line; a text never does.
_COMMENT = re.compile(r"^[ \t]*/\*\*.*?\*/\n?", re.MULTILINE | re.DOTALL)


def bundle(sources: Mapping[str, str], main: str) -> str:
    """One module that does what `main` does."""
    order = list(dict.fromkeys(_in_order(sources, main)))
    parts = [_part(path, sources[path], is_main=path == main) for path in order]
    return "const modules = {};\n" + "".join(parts)


def _in_order(sources: Mapping[str, str], path: str) -> Iterator[str]:
    """What a module imports, then the module itself."""
    for _, target in _IMPORT.findall(sources[path]):
        yield from _in_order(sources, _beside(path, target))
    yield path


def _part(path: str, source: str, is_main: bool) -> str:
    code = _IMPORT.sub(lambda found: _taken(path, found[1], found[2]), _NOTHING.sub("", source))
    names = ", ".join(_EXPORT.findall(code))
    body = _COMMENT.sub("", _EXPORT.sub("", code))
    if is_main:
        return f"await (async () => {{\n{body}}})();\n"
    return f'modules["{path}"] = (() => {{\n{body}return {{ {names} }};\n}})();\n'


def _taken(path: str, names: str, target: str) -> str:
    """The import of a module, from where the module before has put it."""
    return f'const {{ {names.strip().replace(" as ", ": ")} }} = modules["{_beside(path, target)}"];\n'


def _beside(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
