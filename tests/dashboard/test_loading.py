"""How a page loads: as few requests, small and cached, with no chain of modules; and in one language, whatever the
browser's."""

import gzip
import urllib.request
from urllib.error import HTTPError

import pytest
from playwright.sync_api import expect

from conveyor.dashboard.bundle import bundle
from tests.dashboard.browsing import WIDE, Open
from tests.dashboard.world import World

pytestmark = pytest.mark.timeout(120)

LOADED = "performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)"


def test_a_page_is_one_module(here: World, visit: Open) -> None:
    page = visit("#/jobs", viewport=WIDE)
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    files = [path for path in page.evaluate(LOADED) if path.startswith("/dashboard/")]
    assert [path for path in files if path.endswith(".js")] == ["/dashboard/app.js"]
    assert len(set(files)) <= 6
    request = urllib.request.Request(f"{here.url}/dashboard/app.js", headers={"accept-encoding": "gzip"})
    with urllib.request.urlopen(request) as answer:
        small, tag = answer.read(), answer.headers["etag"]
        assert answer.headers["content-encoding"] == "gzip"
    with urllib.request.urlopen(f"{here.url}/dashboard/app.js") as answer:
        assert (gzip.decompress(small), answer.headers["etag"] == tag) == (answer.read(), False)
    request.add_header("if-none-match", tag)
    with pytest.raises(HTTPError, match="304"):
        urllib.request.urlopen(request)


def test_modules_are_joined_in_the_order_of_their_imports() -> None:
    sources = {
        "/main.js": 'import { two as twice } from "./parts/two.js";\nimport {\n  one,\n} from "./one.js";\nsay();\n',
        "/parts/two.js": 'import { one } from "../one.js";\n/** @type {any} */\nexport const two = 2;\nexport {};\n',
        "/one.js": "export async function three() {}\nexport class Four {}\nexport const one = 1;\n",
    }
    assert bundle(sources, "/main.js") == (
        "const modules = {};\n"
        'modules["/one.js"] = (() => {\nasync function three() {}\nclass Four {}\nconst one = 1;\n'
        "return { three, Four, one };\n})();\n"
        'modules["/parts/two.js"] = (() => {\nconst { one } = modules["/one.js"];\nconst two = 2;\n'
        "return { two };\n})();\n"
        'await (async () => {\nconst { two: twice } = modules["/parts/two.js"];\n'
        'const { one, } = modules["/one.js"];\nsay();\n})();\n'
    )


def test_numbers_and_times_are_english_as_the_words_are(here: World, visit: Open) -> None:
    page = visit(f"#/jobs/{here.large}", locale="de-DE")
    expect(page.locator(".tile").first).to_contain_text("of 100,000")
    expect(page.locator(".about")).to_contain_text("expires in 14 days")
