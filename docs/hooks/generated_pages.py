"""The reference pages that are made from the code, and the hook of the documentation's build.

The HTTP API, the command and the settings describe themselves, so nobody writes these pages:
`scripts/reference_pages.py` does. Blocks of commands that no test can run, as they need a server, a
cluster or a cloud, are marked so in the build.
"""

from pathlib import Path
from typing import Any

from command_page import command_page
from fastapi.routing import APIRoute
from glossary_page import glossary_page
from http_page import http_page
from results_tables import with_results
from settings_page import settings_page

from cairn.service.app import create_app
from cairn.service.command.cli import app as command
from cairn.service.dashboard.routers import ROUTERS as PAGES
from cairn.service.glossary import GLOSSARY
from cairn.service.settings import Settings


def generated_pages() -> dict[str, str]:
    """Returns every generated file: its path in the documentation, and its text."""
    # Nothing is opened here, and no variable of this machine has a say.
    app = create_app(Settings(root="./cairn-store", data_dir="./cairn-data"), jobs=False)
    return {
        "reference/glossary.md": glossary_page(GLOSSARY),
        "reference/service/command.md": command_page(command),
        "reference/service/http.md": http_page(app.openapi(), _pages()),
        "reference/service/settings.md": settings_page(Settings),
    }


def _pages() -> list[tuple[str, str]]:
    """Each page of the dashboard that can be looked at: its path, and its first sentence."""
    return [
        (route.path, route.description.splitlines()[0])
        for router in PAGES
        for route in router.routes
        if isinstance(route, APIRoute) and "GET" in route.methods
    ]


def on_config(config: Any) -> Any:
    """Writes out patterns in the navigation, such as `adr/0*.md`; MkDocs calls this."""
    config.nav = _written_out(config.nav, Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Fills in results, and marks the blocks that no test runs; MkDocs calls this."""
    markdown = with_results(markdown)
    # As `sh`, or all of it would look like what a command prints.
    return markdown.replace("```console\n", '```sh title="Not run by the tests"\n')


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Names what the theme leaves without a name for who hears a page; MkDocs calls this."""
    return output.replace('role="dialog">', 'role="dialog" aria-label="Search">')


def _written_out(entry: Any, folder: Path) -> Any:
    if isinstance(entry, dict):
        return {title: _written_out(inner, folder) for title, inner in entry.items()}
    if isinstance(entry, str):
        return entry
    found = []
    for one in entry:
        if isinstance(one, str) and "*" in one:
            found += [path.relative_to(folder).as_posix() for path in sorted(folder.glob(one))]
        else:
            found.append(_written_out(one, folder))
    return found
