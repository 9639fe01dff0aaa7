"""The site as it is built: everybody can read it, and nothing of it comes from elsewhere."""

import functools
import http.server
import os
import subprocess
import sys
import threading

import pytest

from tests.documentation.pages import DOCS, ROOT
from tests.service.dashboard.conftest import AXE, browser, opened

__all__ = ["browser"]
PAGES = ("index", "howto/use-the-dashboard", "comparison")
"""One with code, one with pictures, one with a wide table."""
SERIOUS = """async (rules) => (await axe.run(document, rules)).violations
  .filter((one) => ["serious", "critical"].includes(one.impact))
  .map((one) => `${one.id}: ${one.nodes[0].html.slice(0, 160)}`)"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


AS_IT_IS = f"""
INHERIT: {ROOT / "mkdocs.yml"}
docs_dir: {DOCS}
hooks: [{DOCS / "hooks" / "generated_pages.py"}]
plugins: [search]
watch: []
strict: false
exclude_docs: |
  *.md
{"".join(f"  !/{name}.md{chr(10)}" for name in PAGES)}"""
"""But for other pages, and for what docstrings say in the reference, which takes most of a build's
time. `make check` has it all, and lets no warning pass."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    settings = tmp_path_factory.mktemp("settings") / "mkdocs.yml"
    settings.write_text(AS_IT_IS, encoding="utf-8")
    command = ["mkdocs", "build", "--quiet", "--config-file", settings, "--site-dir", folder]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


DARK = """async () => {
  document.body.setAttribute("data-md-color-scheme", "slate");
  await Promise.all(document.getAnimations().map((one) => one.finished));
}"""
"""As the page does where somebody prefers it; colors change in a moment."""
OF_COLORS = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}


def test_pages_can_be_read_by_everybody_and_on_a_phone(browser, site):
    with opened(browser, site) as page:
        for name in PAGES:
            page.goto(f"/{name}.html")
            page.wait_for_load_state("networkidle")
            page.evaluate(AXE.read_text(encoding="utf-8"))
            assert page.evaluate(SERIOUS, {}) == [], name
            page.evaluate(DARK)
            assert page.evaluate(SERIOUS, OF_COLORS) == [], name
            page.set_viewport_size({"width": 390, "height": 844})
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wide) <= 0, name
            page.set_viewport_size({"width": 1280, "height": 860})
