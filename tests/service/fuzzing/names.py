"""Hooks of schemathesis: most requests name what there is, so that they get past the 404."""

import json
import os
import random
import uuid
from urllib.parse import unquote

import schemathesis

KNOWN = {
    "root": ["default", "second"],
    "run": ["llama-sft", "other", "empty"],
    "step": [3, 6, 9],
    "alias": ["production", "best"],
    "leaf": ["model/norm/scale", "model/layers/1/mlp/up_proj/kernel"],
    **json.loads(os.environ.get("CAIRN_FUZZED_NAMES", "{}")),
}
# By the last part of a path, what can be asked of its list.
FILTERS = {
    "checkpoints": ["step >= 6", 'labels.stage = "final" OR NOT metrics.loss < 0.5', "aliases:*"],
    "runs": ["latest_step > 3 AND labels:*", "aliases:production", "NOT created:*"],
    "audit-events": ["root = default AND NOT outcome:*", 'action = "alias.promote"'],
}
ORDERS = {
    "checkpoints": ["metrics.loss desc, step", "labels.stage", "created"],
    "runs": ["latest_step desc", "labels.team, name desc"],
}
SHARE = 0.7  # of requests whose names are real ones


def chance_of(values):
    return random.Random(repr(sorted(values.items(), key=str)))


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    if path_parameters is None:
        return None
    chance = chance_of(path_parameters)
    for name, values in KNOWN.items():
        if name in path_parameters and chance.random() < SHARE:
            path_parameters[name] = chance.choice(values)
    for name, value in path_parameters.items():
        if isinstance(value, float) and value.is_integer():  # to JSON Schema, 127.0 is an integer
            path_parameters[name] = int(value)
    return path_parameters


@schemathesis.hook
def filter_path_parameters(context, path_parameters):
    """A path that a client would tidy away is another path."""
    given = {name: unquote(str(value)) for name, value in (path_parameters or {}).items()}
    leaf = given.pop("leaf", "leaf").split("/")  # may have several parts
    texts = [*given.values(), *leaf]
    return not any(text in ("", ".", "..") or "/" in text or "latest" in text for text in texts)


@schemathesis.hook
def map_case(context, case):
    """What no schema can say: tokens come from pages, filters parse, and a key is used once."""
    positive = case.meta is not None and case.meta.generation.mode.is_positive
    if positive and case.query:
        case.query.pop("page_token", None)
        case.query.pop("slice", None)
        if "stats" in case.query:
            case.query.pop("format", None)
        for name, known in (("filter", FILTERS), ("order_by", ORDERS)):
            if name in case.query:
                listed = case.operation.path.rpartition("/")[2]
                case.query[name] = chance_of(case.query).choice(known[listed])
        if "other" in case.query:
            case.query["other"] = chance_of(case.query).choice(KNOWN["step"])
            case.query.pop("other_run", None)
    for name in list(case.headers or ()):
        if positive and name.lower() == "idempotency-key":
            case.headers[name] = uuid.uuid4().hex
    if positive and isinstance(case.body, dict) and isinstance(case.body.get("mesh"), dict):
        case.body["mesh"] = {"axes": {"fsdp": 2, "tp": 2}}  # which products can be
        case.body.pop("rules", None)
    if positive and isinstance(case.body, dict) and case.body.get("items") is not None:
        case.body["items"] = ["model"]
    if positive and isinstance(case.body, dict) and "better" in case.body:
        metrics = case.body.get("metrics") or {}
        case.body["better"] = {  # of metrics that there are then
            name: way
            for name, way in case.body["better"].items()
            if way is None or metrics.get(name) is not None
        }
    if positive and isinstance(case.body, dict) and "uri" in case.body:
        case.body["uri"] = KNOWN["uri"][0]  # a folder that is there
    if positive and isinstance(case.body, dict) and "url" in case.body:
        case.body["url"] = "http://127.0.0.1:9/"  # where nobody listens
        case.body.pop("roots", None)  # which there are
    if positive and isinstance(case.body, dict) and "forget" in case.body:
        case.body["forget"] = []
    if positive and isinstance(case.body, dict) and isinstance(case.body.get("policy"), dict):
        case.body["policy"].pop("keep_best", None)  # which metrics there are
        case.body["policy"].pop("keep_labelled", None)
    return case
