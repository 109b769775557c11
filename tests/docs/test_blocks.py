"""What stands in the pages is so: commands parse, jobs validate, Python runs, settings and files are there."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer.main

from conveyor.accept.cron import check_cron
from conveyor.accept.option_limits import check_limits
from conveyor.accept.schedules import ScheduleSpec, template_of
from conveyor.accept.spec import JobSpec, decode_body, decode_spec
from conveyor.accept.task_seeds import check_tasks
from conveyor.cli.command_list import app
from conveyor.errors import ConveyorError
from conveyor.export.lines import ManifestLine
from conveyor.model import OnInvalid
from conveyor.settings import PREFIX, Settings
from conveyor.telemetry.metrics import CATALOGUE
from tests.docs.blocks import DOCS, PAGES, ROOT, Block, all_blocks, blocks, commands, prose

# Every block is of one of these; `text` is what is shown, and is run by nobody.
LANGUAGES = {"sh", "python", "json", "text"}
# Pages whose Python is run in order, by tests of their own.
_RUN_ELSEWHERE = {DOCS / "sdk.md"}
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = typer.main.get_command(app)
_NAMES = {"conveyor", ".venv/bin/conveyor"}
_BREAK = re.compile(r"^[|;&<>()]+$")


def ids(blocks: list[Block]) -> list[str]:
    return [block.place for block in blocks]


def conveyor_calls(code: str) -> Iterator[list[str]]:
    """The arguments of each `conveyor` in a piece of shell, also of those in `$(…)`."""
    for line in commands(code):
        for part in [*re.findall(r"\$\(([^)]*)\)", line), re.sub(r"\$\([^)]*\)", "X", line)]:
            words = shell_words(part)
            for start, word in enumerate(words):
                if word in _NAMES and (start == 0 or _BREAK.match(words[start - 1]) or "=" in words[start - 1]):
                    rest = words[start + 1 :]
                    end = next((at for at, each in enumerate(rest) if _BREAK.match(each)), len(rest))
                    yield rest[:end]


def shell_words(part: str) -> list[str]:
    lexer = shlex.shlex(part, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        # A line of something that is no shell, with a lone quote.
        return []


def leaf(words: list[str]) -> tuple[Any, str, list[str]]:
    """The command that the first words name, its name, and the rest of them."""
    command: Any = COMMAND
    name = "conveyor"
    rest = list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        name = f"{name} {rest[0]}"
        command = command.commands[rest.pop(0)]
    return command, name, rest


def test_every_block_says_what_it_is() -> None:
    assert {block.language for page in PAGES for block in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_hides_in_an_indent(page: Path) -> None:
    """Code in a fence is checked, code in an indent would not be."""
    assert not re.search(r"(?:^|\n\n)(?!\s*(?:[-*]|\d+\.) )    \S[^\n]*\n", re.sub(r"\n {3,}[-*] .*", "", prose(page)))


def test_every_command_parses() -> None:
    seen = 0
    for block in all_blocks("sh", "text"):
        for words in conveyor_calls(block.code):
            command, name, rest = leaf(words)
            assert name != "conveyor" or rest in ([], ["--help"]), (block.place, words)
            try:
                command.make_context(name, rest)
            except Exception as error:
                # A file of the reader's is not here.
                assert "does not exist" in str(error), (block.place, words, str(error))
            seen += 1
    assert seen > 60


def test_every_command_in_the_text_is_there() -> None:
    for page in PAGES:
        for code in re.findall(r"`(?:\.venv/bin/)?conveyor ([^`]+)`", prose(page)):
            words = code.replace("\n", " ").split()
            command, name, rest = leaf(words)
            assert (
                name != "conveyor" or rest[0] in ("--help", "--version", "--install-completion", "…") or "|" in rest[0]
            ), (page, code)
            flags = {flag for param in command.params for flag in param.opts}
            assert {word for word in rest if word.startswith("--")} <= {*flags, "--help"}, (page, code)


def check_job(raw: bytes) -> None:
    spec = decode_spec(raw)
    check_limits(spec)
    if spec.tasks:
        check_tasks(spec.kind, spec.tasks, len(spec.tasks), OnInvalid.REJECT)


def check_json(code: str) -> None:
    value = json.loads(code)
    keys = set(value)
    if keys == {"job"}:
        check_job(json.dumps(value["job"]).encode())
    elif "cron" in keys:
        schedule = decode_body(code.encode(), ScheduleSpec)
        check_cron(schedule.cron, schedule.timezone)
        check_limits(template_of(bytes(schedule.job)).spec)
    elif {"create", "status"} <= keys:
        check_job(json.dumps({"kind": "export_download", "export": value, "tasks": [{"month": "1"}]}).encode())
    elif keys == {"Version", "Statement"}:
        # A policy of IAM for what users own: no example gives away the right to delete there.
        actions = [action for statement in value["Statement"] for action in statement["Action"]]
        assert not [action for action in actions if "Delete" in action or "*" in action]
    elif "task_id" in keys:
        assert list(value) == list(ManifestLine.__struct_fields__)
    else:
        assert keys <= set(JobSpec.__struct_fields__), keys
        check_job(code.encode())


@pytest.mark.parametrize("block", found := all_blocks("json"), ids=ids(found))
def test_every_json_is_what_the_api_takes(block: Block) -> None:
    check_json(block.code)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").rglob("*.json")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_json_of_the_examples_too(path: Path) -> None:
    check_json(path.read_text())


@pytest.mark.parametrize(
    "wrong",
    ['{"tasks": ["x"]}', '{"concurency": 3}', '{"attempts": 0}', '{"cron": "* * * *", "job": {}}', '{"job": 1}'],
)
def test_a_wrong_one_would_be_found(wrong: str) -> None:
    with pytest.raises((AssertionError, ConveyorError)):
        check_json(wrong)


@pytest.mark.parametrize("wrong", ["conveyor run a --nonsense -o b.zip", "X=$(conveyor sumbit a)", "conveyor run a"])
def test_a_wrong_command_too(wrong: str) -> None:
    [words] = conveyor_calls(wrong)
    command, name, rest = leaf(words)
    if name != "conveyor":
        with pytest.raises(Exception, match=r"No such option|Missing"):
            command.make_context(name, rest)
    else:
        assert rest


@pytest.mark.parametrize(
    "block", found := [block for block in all_blocks("python") if block.page not in _RUN_ELSEWHERE], ids=ids(found)
)
def test_every_python_runs(block: Block) -> None:
    from conveyor import handlers

    before = dict(handlers.default._by_name)
    try:
        exec(compile(block.code, block.place, "exec"), {"__name__": "docs"})
    finally:
        handlers.default._by_name.clear()
        handlers.default._by_name.update(before)


def test_every_setting_is_one() -> None:
    known = {PREFIX + field.upper() for field in Settings.__struct_fields__}
    files = [*PAGES, *(path for path in (ROOT / "examples").rglob("*") if path.suffix in {".py", ".ipynb", ".json"})]
    for page in files:
        named = set(re.findall(rf"\b{PREFIX}[A-Z][A-Z_]*[A-Z]\b", page.read_text()))
        assert named <= known, (page, named - known)


def test_defaults_in_the_text_are_those_of_the_code() -> None:
    """Of a setting that is followed by its default in parentheses."""
    units = {"s": 1, "minutes": 60, "hours": 3600, "days": 86_400, "MiB": 1024**2}
    seen = 0
    for page in PAGES:
        for name, number, unit in re.findall(rf"`{PREFIX}([A-Z_]+)`\s\((\d[\d,.]*)\s?(\w*)", page.read_text()):
            default = getattr(Settings(), name.lower())
            assert float(number.replace(",", "").rstrip(".")) * units.get(unit, 1) == default, (page, name, number)
            seen += 1
    assert seen > 8


def test_every_extra_is_one() -> None:
    known = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for page in PAGES:
        for names in re.findall(r"'(?:conveyor-jobs|\.|\S+\.whl)\[([a-z,]+)\]'", page.read_text()):
            assert set(names.split(",")) <= known, (page, names)
    listed = set(re.findall(r"^\| `([a-z]+)` \|", (DOCS / "index.md").read_text(), re.MULTILINE))
    assert listed == known - {"dev"}


def test_no_command_installs_it_from_an_index() -> None:
    """It is on none: whoever took its name there would be installed."""
    for page in PAGES:
        for block in re.findall(r"^```.*?^```", page.read_text(), re.MULTILINE | re.DOTALL):
            assert not re.search(r"pip install [^\n]*(?<![/.\w])'?conveyor-jobs", block), (page, block)


def test_every_metric_is_one() -> None:
    known = {metric.name for metric in CATALOGUE}
    for page in PAGES:
        assert set(re.findall(r"`(conveyor_[a-z_]+)`", page.read_text())) <= known, page


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in _LINK.findall(prose(page)):
            parts = urlsplit(target)
            if not parts.scheme and parts.path:
                assert (page.parent / parts.path).exists(), (page, target)
