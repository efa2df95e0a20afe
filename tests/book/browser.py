"""A headless Chromium, and what can be wrong with a page in it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

HOST = "127.0.0.1"
SWITCHES = ["headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"]
SWITCHES += ["disable-background-networking", "disable-component-update", "disable-dev-shm-usage", "disable-extensions"]

# Waits for fonts and formulas, then reports on the page.
INSPECT = r"""
const done = arguments[arguments.length - 1];
const MATH = ".math.notranslate, .MathJax_Preview";
const visible = (node) => { const b = node.getBoundingClientRect(); return b.width > 0 && b.height > 0; };
(async () => {
  // The script is loaded asynchronously: on a busy machine it may come after the page.
  const comes = document.querySelector("script[src*='mathjax']");
  for (let i = 0; comes && i < 300 && !(window.MathJax && MathJax.startup && MathJax.startup.promise); i++)
    await new Promise((go) => setTimeout(go, 100));
  if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
  const missing = () => document.querySelectorAll("mjx-container").length < document.querySelectorAll(MATH).length;
  for (let i = 0; comes && i < 100 && missing(); i++) await new Promise((go) => setTimeout(go, 100));
  document.querySelectorAll("details").forEach((d) => { d.dataset.was = d.open; d.open = true; });
  await Promise.all([...document.images].map((i) => { i.loading = "eager"; return i.decode().catch(() => {}); }));
  await document.fonts.ready;
  const article = document.querySelector("article.bd-article, article") || document.body;
  const prose = article.cloneNode(true);
  prose.querySelectorAll("pre, code, script, style, mjx-container, .MathJax").forEach((n) => n.remove());
  const formulas = [...document.querySelectorAll("mjx-container")];
  done({
    formulas: document.querySelectorAll(MATH).length,
    typeset: formulas.filter(visible).length,
    errors: [...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map((n) => n.textContent),
    fonts: [...document.fonts].filter((f) => f.status === "error").map((f) => f.family),
    glyphs: formulas.length === 0 || [...document.fonts].some((f) => /MJX/.test(f.family) && f.status === "loaded"),
    raw: (prose.textContent.match(/\\\(|\\\[|\$\$|\\(frac|text|cdot|times|sum|lceil|left|begin)\b/g) || []),
    images: [...document.images].filter((i) => i.naturalWidth === 0).map((i) => i.src.slice(0, 100)),
    undescribed: [...article.querySelectorAll("img")].filter((i) => !i.alt.trim()).map((i) => i.src.slice(0, 100)),
    opened: [...article.querySelectorAll("details[data-was=true]")].map((d) => d.textContent.slice(0, 60)),
    sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  });
})().catch((error) => done({failed: String(error)}));
"""


def missing() -> str:
    """What is not installed, or an empty string."""
    names = {"Chromium": ("chromium", "chromium-browser", "google-chrome"), "its driver": ("chromedriver",)}
    return " and ".join(what for what, programs in names.items() if not any(map(shutil.which, programs)))


@contextmanager
def chromium(folder: str, width: int = 1200) -> Iterator[webdriver.Chrome]:
    """A browser with a fresh profile in `folder`, which resolves no name and logs what pages ask for."""
    options = Options()
    options.binary_location = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    for switch in SWITCHES:
        options.add_argument(f"--{switch}")
    options.add_argument(f"--user-data-dir={folder}")
    options.add_argument(f"--window-size={width},900")
    options.add_argument(f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {HOST}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    driver.get("about:blank")  # or the new-tab page goes on loading, and complaining, behind the first test
    try:
        yield driver
    finally:
        driver.quit()


def inspect(driver: webdriver.Chrome, url: str) -> tuple[list[str], dict]:
    """Open a page: (what is wrong with it, what INSPECT saw)."""
    driver.get_log("performance"), driver.get_log("browser")  # what earlier pages left
    driver.get(url)
    seen = driver.execute_async_script(INSPECT)
    if "failed" in seen:
        return [seen["failed"]], seen
    problems = [f"asks {address}" for address in foreign_requests(driver)]
    problems += [f"console: {entry['message']}" for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    if seen["formulas"] != seen["typeset"]:
        problems.append(f"{seen['formulas']} formulas, {seen['typeset']} typeset")
    if not seen["glyphs"]:
        problems.append("MathJax's own fonts did not load")
    for kind in ("errors", "fonts", "raw", "images", "undescribed", "opened"):
        if seen[kind]:
            problems.append(f"{kind}: {seen[kind][:5]}")
    if seen["sideways"] > 0:
        problems.append(f"the page scrolls sideways by {seen['sideways']} px")
    return problems, seen


def foreign_requests(driver: webdriver.Chrome) -> list[str]:
    """Addresses on other hosts that the page asked for, whether or not an answer came."""
    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
            url = message["params"].get("request", message["params"])["url"]
            parts = urlsplit(url)
            # The browser's own pages, such as the new tab that it starts with, are no part of the site.
            own = parts.scheme in ("data", "blob", "about") or parts.scheme.startswith("chrome")
            if not own and parts.hostname != HOST:
                found.append(url)
    return found
