"""The glossary as a page, from the terms that the dashboard's help shows."""

from collections.abc import Mapping

HEAD = """# Glossary

The words that commands, pages, errors and the API use. The dashboard shows them at `/help`.

| term | means |
|---|---|
"""


def glossary_page(terms: Mapping[str, str]) -> str:
    """Returns the page of the terms, by name."""
    rows = [f"| {term} | {text} |" for term, text in sorted(terms.items())]
    return HEAD + "\n".join(rows) + "\n"
