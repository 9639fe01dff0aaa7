"""Convert job: exports a stored model as a Hugging Face folder or a GGUF file."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.tensor_streams import float_dtype
from cairn.interop.errors import InteropError
from cairn.interop.trainers.mapped_model import MappedModel
from cairn.interop.weights.adapter_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from cairn.interop.weights.export import (
    adapter_sources,
    export_sources,
    mapped_model,
    stored_config,
)
from cairn.interop.weights.files import CONFIG_FILE, GENERATION_FILE
from cairn.interop.weights.generation_file import generation_file
from cairn.interop.weights.gguf_writing import GGUF_TYPES, stored_gguf
from cairn.interop.weights.weight_files import INDEX_FILE
from cairn.service.errors import InvalidRequestError
from cairn.service.jobs.context import JobContext, JobKind, Request, Result
from cairn.service.jobs.kinds.export_job import (
    Checked,
    ExportContent,
    abandon_export,
    leave_export,
    run_export,
    write_part,
)
from cairn.service.jobs.kinds.logits_check import (
    REPORT_FILE,
    UNPROVED,
    LogitsCheck,
    check_installed,
)
from cairn.service.jobs.kinds.reference_logits import check_reference_place
from cairn.service.jobs.kinds.trainer_settings import settings_beside
from cairn.service.schemas import ConvertRequest
from cairn.service.sentences import members_of
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.records.assets import read_asset
from cairn.storage.runs.records.manifest import AssetRecord, Manifest
from cairn.storage.runs.run import Run
from cairn.storage.safetensors.sizes import parse_size
from cairn.storage.safetensors.writer import Shard, plan_shards
from cairn.storage.store.uri import StoreURI, check_segment

KIND: Final = "convert"
# Part of every artifact's identity. Raise it when the same checkpoint and options give other bytes,
# so that old artifacts are not taken for new ones.
RULE_VERSION: Final = 5
NO_TOKENIZER: Final = (
    "none: the step was saved without tokenizer files, which an endpoint such as transformers "
    "serve needs. from_pretrained(FOLDER) brings those of the folder along, "
    "DecoderConfig(tokenizer_files=...) others."
)
NO_TOKENIZER_OF_TRAINERS: Final = (
    "none: trainers store no tokenizer with a step. Load it from the folder of the model that was "
    "trained, or copy its files into a copy of the export for an endpoint that needs them there."
)
_TOKENIZERS: Final = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json"})


HUGGINGFACE: Final = "huggingface"
GGUF: Final = "gguf"
MERGE: Final = "merge"
KEEP: Final = "keep"


def check_convertible(run: Run, manifest: Manifest, options: Mapping[str, Any]) -> None:
    """Raise if no convert job could succeed with these options.

    Raises:
        InvalidRequestError: The model's type is unknown, or an option has an invalid value.
        UnsupportedFormatError: `max_shard_size` is no size.
        SourceRefusedError: The server may not open the file of reference logits.
    """
    with _as_invalid_request():
        mapped = _mapped(run, manifest, options)
        config = stored_config(manifest) if mapped is None else mapped.config
        if mapped is not None and options.get("lora", MERGE) == KEEP:
            raise InvalidRequestError(
                f"lora: expected 'merge' for a tree of {mapped.tree.trainer.name}, found 'keep'; "
                "leave it out"
            )
        if mapped is None and "config" in options:
            raise InvalidRequestError(
                "config: expected only for a step that another trainer stored, found a step with a "
                "config of its own; leave it out"
            )
        if "reference_logits" in options:
            check_reference_place(run, options["reference_logits"])
        if options.get("check_logits", False):
            _check_comparable(config, options)
        if options["format"] != GGUF:
            float_dtype(options["dtype"], argument="dtype")
        elif options["dtype"] not in (None, *GGUF_TYPES):
            raise InvalidRequestError(
                f"dtype: expected for GGUF one of {', '.join(GGUF_TYPES)}, found "
                f"{options['dtype']!r}"
            )
        elif options.get("lora", MERGE) == KEEP:
            raise InvalidRequestError(
                "lora: expected for GGUF 'merge', found 'keep'; leave it out, or export the "
                "adapters with format 'huggingface'"
            )


def _check_comparable(config: EDPretrainedConfig, options: Mapping[str, Any]) -> None:
    """Raise if `check_logits` is requested for an export that transformers cannot load.

    Raises:
        InvalidRequestError: The export is not a whole model, or not one that transformers has.
    """
    if options["format"] == GGUF or options.get("lora", MERGE) == KEEP:
        raise InvalidRequestError(
            "check_logits: expected format 'huggingface' of the whole model, found "
            f"{'format gguf' if options['format'] == GGUF else 'lora keep'}; leave it out"
        )
    if not isinstance(config, DecoderConfig):
        raise InvalidRequestError(
            "check_logits: expected a model of a family that transformers has, found the model "
            f"type {config.model_type!r}; leave it out"
        )


def requested_options(body: ConvertRequest) -> dict[str, Any]:
    """Return the options of a request in the canonical form that identifies its artifact.

    Options of later releases are left out at their defaults, so that the identity stays the same.

    Raises:
        UnsupportedFormatError: `max_shard_size` is no size.
    """
    checks_logits = body.check_logits or body.reference_logits
    return {
        "format": GGUF if body.format == "gguf" else HUGGINGFACE,
        "dtype": body.dtype,
        "max_shard_bytes": parse_size(body.max_shard_size),
        **({"lora": body.lora} if body.lora != MERGE else {}),
        **({"allow_nonfinite": True} if body.allow_nonfinite else {}),
        **({"check_logits": True} if checks_logits else {}),
        **({"config": dict(body.config)} if body.config else {}),
        **({"reference_logits": body.reference_logits} if body.reference_logits else {}),
    }


def _mapped(run: Run, manifest: Manifest, options: Mapping[str, Any]) -> MappedModel | None:
    """Return the model that another trainer stored in the step; None if it has one of ours."""
    described, looked_at = options.get("config"), ""
    if described is None and manifest.plain is not None and manifest.model is None:
        described, looked_at = settings_beside(run, manifest)
    return mapped_model(manifest, described, looked_at=looked_at)


def _map_notes(mapped: MappedModel, options: Mapping[str, Any]) -> dict[str, str]:
    """Return what the result says of a map, by name."""
    notes = {"map": mapped.layout}
    if mapped.left_out:
        notes["left_out"] = "; ".join(mapped.left_out)
    if mapped.assumed:
        notes["assumed"] = "; ".join(mapped.assumed)
    if "reference_logits" not in options:
        notes["unproved"] = UNPROVED
    return notes


def _plan(
    run: Run, manifest: Manifest, reader: CheckpointReader, options: Mapping[str, Any]
) -> ExportContent:
    finite = not options.get("allow_nonfinite", False)
    if options.get("check_logits", False):
        check_installed()
    with _as_invalid_request():
        mapped = _mapped(run, manifest, options)
    notes = {} if mapped is None else _map_notes(mapped, options)
    if options["format"] == GGUF:
        assets = {asset.name: _read_asset(run, asset) for asset in manifest.assets}
        dtype = options["dtype"] or "float16"
        with _as_invalid_request():
            shard, note = stored_gguf(manifest, reader, assets, dtype=dtype, mapped=mapped)
        notes |= {} if note is None else {"tokenizer": note}
        return ExportContent((shard,), {}, {}, finite=finite, notes=notes)
    if options.get("lora", MERGE) == KEEP:
        with _as_invalid_request():
            tensors, content = adapter_sources(manifest, reader, dtype=options["dtype"])
        alone = Shard(ADAPTER_FILE, tuple(tensors), sum(tensor.nbytes for tensor in tensors))
        small = {ADAPTER_CONFIG_FILE: _json(content)}
        return ExportContent((alone,), {"format": "pt"}, small, finite=finite)
    with _as_invalid_request():
        sources, config = export_sources(manifest, reader, dtype=options["dtype"], mapped=mapped)
    shards = tuple(plan_shards(sources, options["max_shard_bytes"]))
    own = {CONFIG_FILE: _json(config)}
    if len(shards) > 1:
        weight_map = {tensor.name: shard.file_name for shard in shards for tensor in shard.tensors}
        total_size = sum(shard.nbytes for shard in shards)
        own[INDEX_FILE] = _json({"metadata": {"total_size": total_size}, "weight_map": weight_map})
    taken = {*own, *(shard.file_name for shard in shards)}
    assets = {
        asset.name: _read_asset(run, asset) for asset in manifest.assets if asset.name not in taken
    }
    with _as_invalid_request():
        settings = generation_file(config, assets.get(GENERATION_FILE))
    if settings is not None:
        assets[GENERATION_FILE] = settings
    if not _TOKENIZERS & assets.keys():
        notes["tokenizer"] = NO_TOKENIZER if mapped is None else NO_TOKENIZER_OF_TRAINERS
    small = {**assets, **own}
    return ExportContent(shards, {"format": "pt"}, small, finite=finite, notes=notes)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _read_asset(run: Run, asset: AssetRecord) -> bytes:
    check_segment(asset.name, within=run.uri)
    return read_asset(run.objects, asset)


@contextmanager
def _as_invalid_request() -> Iterator[None]:
    """Raise errors of `interop` as invalid requests: the request asks for something impossible."""
    try:
        yield
    except InteropError as exc:
        raise InvalidRequestError(str(exc), extra=members_of(exc)) from exc


def _logits_notes(report: Mapping[str, Any]) -> dict[str, str]:
    """Return what a comparison of logits found, as an entry of the result; it has not failed."""
    if "relative_difference" not in report:
        return {}
    by = "the trainer's" if "reference" in report else "the checkpoint's"
    note = (
        f"agree with {by}: {report['relative_difference']:.2g} of the largest, at most "
        f"{report['tolerance']:.2g}"
    )
    if report.get("reference", {}).get("head_dtype"):
        note += (
            f"; as the trainer's forward pass does, the check rounds the tied head to "
            f"{report['reference']['head_dtype']}, the files are not rounded"
        )
    return {"logits": note}


def _run(context: JobContext, request: Request) -> Result:
    options = request["options"]
    if not options.get("check_logits", False):
        return run_export(context, request, _plan)

    def check(context: JobContext, step: StoreURI, folder: StoreURI, manifest: Manifest) -> Checked:
        run = Run.open(step.parent.parent)
        mapped = _mapped(run, manifest, options)
        config = stored_config(manifest) if mapped is None else mapped.config
        comparison = LogitsCheck(
            step,
            folder,
            cast(DecoderConfig, config),
            options["dtype"],
            reference=options.get("reference_logits"),
            is_mapped=mapped is not None,
            head_rounding=None if mapped is None else mapped.head_rounding,
            is_renamed=manifest.plain is not None,
        )
        report = comparison.report(context)
        return Checked({REPORT_FILE: _json(report)}, _logits_notes(report))

    return run_export(context, request, _plan, check)


CONVERT: Final = JobKind(
    KIND,
    _run,
    abandon_export,
    part=partial(write_part, plan=_plan),
    leave=leave_export,
)
