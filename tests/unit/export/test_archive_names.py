"""Names of bodies in an archive: by id, by template, safe, and each once."""

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.errors import InvalidField
from conveyor.export.archive_names import ArchiveNames, EarlierNames, NameRegister, checked_names
from conveyor.model import JobKind, ResultDetail, RunId, Task, task_id
from conveyor.states import TaskStatus

SAFE = re.compile(r"bodies(/(?!\.)[A-Za-z0-9._~-]{1,220}(?<!\.))+")


def task(index: int, given_input: object, content_type: str = "text/html") -> Task:
    raw = msgspec.Raw(msgspec.json.encode(given_input))
    detail = ResultDetail(content_type=content_type)
    return Task(task_id(RunId("run_1"), index), index, raw, TaskStatus.SUCCEEDED, detail=detail)


def with_id(index: int, own: object, **more: object) -> Task:
    return task(index, {"url": "https://example.com/a", "id": own, **more})


def names(*tasks: Task, template: str | None = None, register: NameRegister | None = None) -> list[str]:
    given_out = ArchiveNames(JobKind.FETCH, template, register)
    return [given_out.name(each) for each in tasks]


@pytest.mark.parametrize(
    ("own", "name"),
    [
        ("SKU-12", "bodies/SKU-12.html"),
        ("a/b\\c:d", "bodies/a-b-c-d.html"),
        ("../../etc/passwd", "bodies/etc-passwd.html"),
        ("page.html", "bodies/page.html"),
        ("nul", "bodies/_nul.html"),
        ("CON.txt", "bodies/_CON.txt.html"),
        ("漢字", "bodies/0000007_example.com-a.html"),
        ("", "bodies/0000007_example.com-a.html"),
        ("0000003_x", "bodies/_0000003_x.html"),
        ("x" * 300, f"bodies/{'x' * 100}.html"),
    ],
)
def test_a_body_is_named_by_its_id(own: str, name: str) -> None:
    assert names(with_id(7, own)) == [name]


def test_the_same_id_twice_makes_two_names() -> None:
    assert names(with_id(1, "a"), with_id(2, "A"), with_id(3, "a!"), with_id(4, "b")) == [
        "bodies/a.html",
        "bodies/A~2.html",
        "bodies/a~3.html",
        "bodies/b.html",
    ]


def test_a_task_that_did_not_fit_asks_again() -> None:
    register = NameRegister()
    assert names(with_id(1, "a"), register=register) == names(with_id(1, "a"), register=register) == ["bodies/a.html"]


def test_a_process_without_the_names_before_adds_the_index() -> None:
    later = NameRegister(is_new=False)
    assert names(with_id(5, "a"), task(6, "https://example.com/"), register=later) == [
        "bodies/a~5.html",
        "bodies/0000006_example.com.html",
    ]
    assert names(with_id(8, "a"), template="{index}-{id}{ext}", register=later) == ["bodies/0000008-a.html"]


def test_a_number_of_another_task_is_no_name() -> None:
    big = task(1_000_007, "https://example.com/")
    assert len({*names(with_id(1, "1000007_example.com"), big)}) == 2
    assert len({*names(big, with_id(1, "1000007_example.com"))}) == 2


def test_templates() -> None:
    one = with_id(7, "a/b", tag="new", data={"City": "São Paulo", "n": 3, "nested": [1]})
    made = {
        "{id}{ext}": "bodies/a-b.html",
        "{tag}/{id}{ext}": "bodies/new/a-b.html",
        "{host}/{index}_{slug}": "bodies/example.com/0000007_example.com-a",
        "{data.City}-{data.n}.txt": "bodies/S-o-Paulo-3.txt",
        "{data.nested}{ext}": "bodies/0000007.html",
        "{data.none}/x{ext}": "bodies/x.html",
        "{task_id}": f"bodies/{one.task_id}",
    }
    assert {template: names(one, template=template)[0] for template in made} == made


@pytest.mark.parametrize(
    "template", ["", "x" * 201, "plain", "/{id}", "../{id}", "{id}\\x", "{unknown}", "{data.}", "{id", "{id} {tag}"]
)
def test_a_template_that_cannot_be_used_is_refused(template: str) -> None:
    with pytest.raises(InvalidField):
        checked_names(template)


def test_a_file_of_the_version_before_keeps_its_names() -> None:
    assert EarlierNames(JobKind.FETCH).name(with_id(7, "a")) == "bodies/0000007_example.com-a.html"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text(max_size=12) | st.sampled_from(["a", "A", "a~1", "0000001", "con"]), max_size=12),
    st.sampled_from([None, "{id}{ext}", "{tag}/{id}", "{data.x}{ext}"]),
)
def test_names_are_safe_and_unique(ids: list[str], template: str | None) -> None:
    tasks = [with_id(index, own, tag=own[::-1], data={"x": own}) for index, own in enumerate(ids)]
    given_out = names(*tasks, template=template)
    assert all(SAFE.fullmatch(name) for name in given_out)
    assert len({name.lower() for name in given_out}) == len(given_out)
