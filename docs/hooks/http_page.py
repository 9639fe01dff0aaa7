"""The HTTP API as a page, from its OpenAPI document."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HEAD = """# HTTP

The control plane answers under `/v1`; `/healthz` and `/readyz` are for probes, `/metrics` is for
Prometheus; [pages](#pages) for people begin at `/`. A running server hands out this
description at `/openapi.json`, complete enough to generate a client from; `make openapi` prints
that of this version.

A server with keys (`CAIRN_AUTH=keys`) answers below `/v1` who sends `Authorization: Bearer` and a
key or token, or a browser that has signed in: [how](../../howto/keys.md). Others get 401, callers
who may not 403, and who asks too often 429 with `Retry-After`.

Unknown query parameters under `/v1` are rejected (422).

Every error is `application/problem+json` with the body [Problem](#body-problem);
[troubleshooting](../../howto/troubleshooting.md) has each by the last part of its `type`.
An alias has an
`ETag`, and whoever moves it says in `If-Match` what was last seen. Long work answers 202 with an
[Operation](#body-operation), which can be followed as server-sent events.
"""

JSON = ("application/json", "application/problem+json")
BAD_REQUEST = 400


def http_page(document: Mapping[str, Any], pages: Sequence[tuple[str, str]]) -> str:
    """Returns the page of an OpenAPI document, and of the dashboard's pages: path and what."""
    parts = [HEAD]
    tag = None
    texts = {entry["name"]: entry["description"] for entry in document["tags"]}
    for method, path, operation in operations(document):
        if operation["tags"][0] != tag:
            tag = operation["tags"][0]
            parts.append(f"\n## {tag.capitalize()}\n\n{texts[tag]}\n")
        parts.append(_operation(method, path, operation))
    parts.append("\n## Pages\n\nFor people, from the functions of the API.\n\n")
    parts += ["| page | what |\n|---|---|\n", *(f"| `{path}` | {what} |\n" for path, what in pages)]
    parts.append("\n## Bodies\n")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(_schema(name, schema))
    return "".join(parts)


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields (method, path, operation) of an OpenAPI document, those of one tag together."""
    found = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    tags = list(dict.fromkeys(operation["tags"][0] for _, _, operation in found))
    yield from sorted(found, key=lambda one: tags.index(one[2]["tags"][0]))


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    title = operation["operationId"].replace("_", " ").capitalize()
    lines = [
        f"\n### {title}\n",
        f"```http\n{method} {path}\n```\n",
        operation.get("description", "").strip(),
        "",
    ]
    if permission := operation.get("x-cairn-permission"):
        roots = " in all roots" if permission["all_roots"] else ""
        lines.append(f"Takes the scope `{permission['scope']}`{roots}.\n")
    parameters = operation.get("parameters", [])
    if parameters:
        lines += ["| parameter | in | type | what |", "|---|---|---|---|"]
        for one in parameters:
            name = f"`{one['name']}`" + (" (required)" if one.get("required") else "")
            what = _cell(one.get("description", ""))
            lines.append(f"| {name} | {one['in']} | {_type(one['schema'])} | {what} |")
        lines.append("")
    body = operation.get("requestBody")
    if body:
        lines.append(f"Body: {_content(body)}.\n")
    answers = sorted(operation["responses"].items())
    lines += ["| status | body |", "|---|---|"]
    for status, response in answers:
        if int(status) < BAD_REQUEST:
            what = _content(response) or response.get("description", "")
            lines.append(f"| {status} | {what} |")
    problems = [status for status, _ in answers if int(status) >= BAD_REQUEST]
    lines.append(f"| {', '.join(problems)} | {_link('Problem')} |")
    return "\n".join(lines) + "\n"


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    lines = [f"\n### {name} {{#{_anchor(name)}}}\n", schema.get("description", "").strip(), ""]
    if "enum" in schema:
        lines.append("One of " + ", ".join(f"`{value}`" for value in schema["enum"]) + ".")
    required = set(schema.get("required", []))
    if schema.get("properties"):
        lines += ["| field | type | what |", "|---|---|---|"]
    for field, kind in schema.get("properties", {}).items():
        notes = [_cell(kind.get("description", ""))]
        if "default" in kind:
            notes.append(f"Default: `{kind['default']}`.")
        shown = f"`{field}`" + (" (required)" if field in required else "")
        lines.append(f"| {shown} | {_type(kind)} | {' '.join(notes).strip()} |")
    for example in schema.get("examples", []) if name.endswith("Request") else []:
        shown = json.dumps(example, indent=2, ensure_ascii=False)
        lines.append(f"\n```json\n{shown}\n```")
    return "\n".join(lines) + "\n"


def _content(holder: Mapping[str, Any]) -> str:
    """The types of a request's or an answer's body, as links to their sections."""
    found = []
    for media, content in holder.get("content", {}).items():
        kind = _type(content["schema"]) if content.get("schema") else ""
        if kind and media in JSON:
            found.append(kind)
        else:
            found.append(f"`{media}`" + (f" of {kind}" if kind else ""))
    return ", ".join(found)


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _link(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    return str(schema.get("format") or schema.get("type") or "any")


def _link(name: str) -> str:
    return f"[{name}](#{_anchor(name)})"


def _anchor(name: str) -> str:
    return f"body-{name.lower()}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
