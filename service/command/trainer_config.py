"""The file of --config: a config.json, or the settings of another trainer."""

from json import loads
from pathlib import Path
from typing import Any

import typer

from cairn.interop.trainers.maxtext_settings import flat_yaml, is_maxtext


def read_trainer_config(path: Path) -> dict[str, Any]:
    """Return the content of a config.json, or of MaxText's config.yml.

    Raises:
        BadParameter: It is neither.
    """
    try:
        text = path.read_text()
        content = loads(text) if text.lstrip().startswith("{") else flat_yaml(text)
    except (OSError, ValueError) as exc:
        raise typer.BadParameter(f"{path}: {exc}") from exc
    if not isinstance(content, dict) or not ("model_type" in content or is_maxtext(content)):
        raise typer.BadParameter(
            f"{path}: expected a config.json with model_type, or MaxText's config.yml with "
            "decoder_block"
        )
    if is_maxtext(content):
        # A model's file in MaxText has no name of its own: the name is the file's.
        content.setdefault("model_name", path.stem)
    return content
