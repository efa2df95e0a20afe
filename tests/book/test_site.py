"""The built site: every page is there, asks no other host for anything, and shows its formulas."""

import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import browser
import pytest
from filelock import FileLock

from tools import site as book

needs_browser = pytest.mark.skipif(
    bool(browser.missing()), reason=f"{browser.missing()} not found: apt-get install chromium chromium-driver"
)
PAGES = [f"{page}.html" for page in book.toc_pages()]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and keeps quiet about it."""

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # a page asks for dozens of files at once; five may wait by default


def serve(folder):
    server = Server((browser.HOST, 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://{browser.HOST}:{server.server_port}"


@pytest.fixture(scope="module")
def html(tmp_path_factory, worker_id):
    """The site, built once with warnings as errors, in a folder of its own that the test processes share."""
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not (folder / "ready").exists():
            book.build(folder)
            (folder / "ready").touch()
    return folder / "_build" / "html"


@pytest.fixture(scope="module")
def address(html):
    server, url = serve(html)
    yield url
    server.shutdown()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with browser.chromium(str(tmp_path_factory.mktemp("profile"))) as chromium:
        yield chromium


def test_every_page_of_the_toc_is_built(html):
    assert book.missing_pages(html) == []


def test_the_front_door_leads_to_the_title_page(html):
    assert "url=intro.html" in (html / "index.html").read_text(encoding="utf-8")


def test_a_missing_page_is_seen(tmp_path):
    assert book.missing_pages(tmp_path) == book.toc_pages()


def test_toc_pages_are_read_at_every_depth(tmp_path):
    toc = tmp_path / "_toc.yml"
    toc.write_text(
        "format: jb-book\nroot: a\nparts:\n- caption: x\n  numbered: 1\n  chapters:\n"
        "  - file: b\n    sections:\n    - file: c/d\n- chapters:\n  - file: e\n"
    )
    assert book.toc_pages(toc) == ["a", "b", "c/d", "e"]


def test_pages_load_scripts_styles_and_images_from_the_site_only(html):
    """The same as the browser sees, for machines that have none."""
    loads = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']((?:https?:)?//[^\"']+)", re.I)
    found = {str(p.relative_to(html)): loads.findall(p.read_text(encoding="utf-8")) for p in html.rglob("*.html")}
    assert {page: urls for page, urls in found.items() if urls} == {}


def test_every_chapter_is_reachable_from_the_title_page(html):
    title = (html / "intro.html").read_text(encoding="utf-8")
    assert [page for page in PAGES[1:] if f'href="{page}"' not in title] == []


@needs_browser
@pytest.mark.parametrize("page", [*PAGES, "search.html?q=block"])
def test_page_in_chromium(driver, address, page, report):
    problems, seen = browser.inspect(driver, f"{address}/{page}")
    report(f"site {page}", f"{seen.get('typeset')} formulas typeset, no other host asked")
    assert problems == []


@needs_browser
def test_broken_pages_are_seen(driver, html, tmp_path):
    """A page that asks another host, one with a formula that nothing typesets, one with a dead image."""
    (tmp_path / "cdn.html").write_text('<article><script src="https://cdn.example.org/x.js"></script></article>')
    (tmp_path / "raw.html").write_text('<article><span class="math notranslate">\\(a^2\\)</span></article>')
    (tmp_path / "image.html").write_text('<article><img src="gone.png"></article>')
    server, url = serve(tmp_path)
    try:
        problems = {name: str(browser.inspect(driver, f"{url}/{name}.html")[0]) for name in ("cdn", "raw", "image")}
    finally:
        server.shutdown()
    assert "asks https://cdn.example.org/x.js" in problems["cdn"]
    assert "1 formulas, 0 typeset" in problems["raw"] and "raw: " in problems["raw"]
    assert "images: " in problems["image"] and "undescribed: " in problems["image"]


@needs_browser
def test_the_formula_count_is_not_vacuous(driver, address, html):
    """Some page of the book has formulas, and MathJax comes from the site itself."""
    with_formulas = [page for page in PAGES if 'class="math notranslate' in (html / page).read_text(encoding="utf-8")]
    assert with_formulas
    _, seen = browser.inspect(driver, f"{address}/{with_formulas[0]}")
    assert seen["typeset"] > 0
    assert (html / "_static" / "mathjax" / "tex-mml-chtml.js").is_file()
