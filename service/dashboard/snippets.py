"""Text to copy from a page: Python and commands that work as they are shown."""

import shlex
from typing import Any

from cairn.service.dashboard import addresses
from cairn.service.export_options import has_permanent_address, typed_options
from cairn.service.schemas import Artifact, Checkpoint, OperationKind
from cairn.service.settings import DEFAULT_ROOT


def load_code(checkpoint: Checkpoint, run_uri: str) -> str:
    """Return Python that loads a step: a state of a known model, or its trees as saved."""
    if checkpoint.model_type and "model" in checkpoint.items:
        return (
            "from cairn import EasyDeLState\n\n"
            f'state = EasyDeLState.load_state("{run_uri}/steps/{checkpoint.step}")'
        )
    return (
        "from cairn import CheckpointManager\n\n"
        f'with CheckpointManager("{run_uri}") as manager:\n'
        f"    restored = manager.restore({checkpoint.step})"
    )


def pull_command(checkpoint: Checkpoint) -> str:
    """Return the command that downloads an export of a step."""
    return _command("pull", *_names(checkpoint), root=checkpoint.root)


def transformers_code(checkpoint: Checkpoint) -> str:
    """Return Python that loads what `pull_command` downloads."""
    _, folder = _names(checkpoint)
    return _transformers(f"{folder}/current")


def convert_command(checkpoint: Checkpoint, *, needs_config: bool) -> str:
    """Return the command that exports a step which another trainer stored."""
    config = ("--config", "FILE") if needs_config else ()
    address = f"{checkpoint.run}/steps/{checkpoint.step}"
    return _command("convert", address, *config, "--watch", root=checkpoint.root)


def gather_command(checkpoint: Checkpoint) -> str:
    """Return the command that writes a step's tensors to one file."""
    address = f"{checkpoint.run}/steps/{checkpoint.step}"
    return _command("gather", address, root=checkpoint.root)


def step_commands(checkpoint: Checkpoint) -> str:
    """Return commands for a step."""
    address, root = f"{checkpoint.run}/steps/{checkpoint.step}", checkpoint.root
    commands = [_command("tensors", address, root=root)]
    if checkpoint.model_type:
        commands.append(_command("convert", address, "--watch", root=root))
    return "\n".join(commands)


def statistics_command(checkpoint: Checkpoint, item: str, path: str) -> str:
    """Return the command that prints what the values of a tensor are like."""
    address = f"{checkpoint.run}/steps/{checkpoint.step}"
    of_item = () if item == "model" else ("--item", item)
    return _command("tensors", address, path, "--stats", *of_item, root=checkpoint.root)


def artifact_code(artifact: Artifact) -> str:
    """Return Python, or the command, that loads the files of an artifact where the store is."""
    folder = artifact.uri.removeprefix("file://")
    if artifact.kind is not OperationKind.CONVERT:
        return (
            "from safetensors.numpy import load_file\n\n"
            f'tensors = load_file("{folder}/{artifact.files[0].name}")'
        )
    gguf = next((file.name for file in artifact.files if file.name.endswith(".gguf")), None)
    if gguf is not None:
        return f"llama-cli -m {shlex.quote(f'{folder}/{gguf}')}"
    if artifact.options.get("lora") == "keep":
        return (
            "from peft import AutoPeftModelForCausalLM\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{folder}")'
        )
    return _transformers(folder)


def permanent_address(artifact: Artifact, origin: str, alias: str | None) -> str | None:
    """Return the address of an export's files that stays; None if the artifact has none."""
    if artifact.kind is not OperationKind.CONVERT or not has_permanent_address(artifact.options):
        return None
    name = artifact.files[0].name if len(artifact.files) == 1 else "NAME"
    return f"{origin}{addresses.export_file(artifact, alias or str(artifact.step), name)}"


def fetch_command(artifact: Artifact, origin: str, alias: str | None, *, needs_key: bool) -> str:
    """Return the command that downloads the files of an artifact from this server.

    An export is pulled with its own options, which find the same artifact again. Files of others,
    and of those that were made with a trainer's config or logits, are fetched by their addresses.

    Args:
        artifact: The artifact.
        origin: Address of this server.
        alias: Alias that names the artifact's step, which the download follows; None: no alias.
        needs_key: Whether the server demands a key.
    """
    if artifact.kind is OperationKind.CONVERT and has_permanent_address(artifact.options):
        step = f"{artifact.run}/steps/{artifact.step}"
        address = f"{artifact.run}@{alias}" if alias else step
        options: list[str] = []
        for name, text in typed_options(artifact.options).items():
            flag = f"--{name.replace('_', '-')}"
            options += [flag] if text == "true" else [flag, text]
        folder = f"models/{artifact.run}-{alias or artifact.step}"
        command = _command("pull", address, folder, *options, root=artifact.root)
        key = "CAIRN_KEY_FILE=FILE " if needs_key else ""
        return f"CAIRN_URL={origin} {key}{command}"
    header = '-H "Authorization: Bearer $(cat "$CAIRN_KEY_FILE")" ' if needs_key else ""
    return "\n".join(
        f"curl -fOJ {header}{origin}/v1/artifacts/{artifact.id}/files/{file.name}"
        for file in artifact.files
    )


def _names(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the address of a step, and the folder that it is downloaded into."""
    name = f"{checkpoint.run}-{checkpoint.step}"  # a folder of its own: others follow an alias
    return f"{checkpoint.run}/steps/{checkpoint.step}", f"models/{name}"


def _transformers(folder: str) -> str:
    return (
        "from transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{folder}")'
    )


def _command(verb: str, *arguments: Any, root: str) -> str:
    flag = () if root == DEFAULT_ROOT else ("--root", root)
    return shlex.join(["cairn", verb, *arguments, *flag])
