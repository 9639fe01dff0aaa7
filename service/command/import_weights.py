"""`cairn import`: writes pretrained weights as a step that another trainer restores."""

from pathlib import Path
from typing import Annotated, Final

import typer

from cairn.service.command.options import console, errors
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.glossary import trainer_label

app: Final = typer.Typer()


@app.command("import")
def import_weights(
    weights: Annotated[
        str,
        typer.Argument(metavar="WEIGHTS", help="Folder or URI of Hugging Face files, or a .gguf."),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of steps to write step 0 to.")
    ],
    trainer: Annotated[
        str, typer.Option("--as", metavar="TRAINER", help="Who restores it: maxtext.")
    ],
    scan: Annotated[
        bool, typer.Option("--scan", help="Stack the layers, as the trainer scans them.")
    ] = False,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Dtype of all weights.")] = "float32",
    json: JsonOption = False,
) -> None:
    """Write pretrained weights as a step for another trainer.

    The step appears in FOLDER once it is whole. MaxText keeps factors in its weights: with float32,
    16-bit weights come back from it bit for bit. The command needs no running control plane, no
    JAX and no trainer.
    """
    # These import TensorStore.
    from cairn.interop.conversion.tensor_streams import float_dtype
    from cairn.interop.weights.files import open_pretrained
    from cairn.interop.weights.trainer_tree import write_trainer_step

    kept = float_dtype(dtype, argument="--dtype")
    assert kept is not None, "an option always has a text"
    step = write_trainer_step(open_pretrained(weights), trainer, folder, scan=scan, dtype=kept)
    if json:
        print_document({**step._asdict(), "folder": str(step.folder)})
        return
    console.print(str(step.folder), soft_wrap=True, markup=False, highlight=False)
    errors.print(
        f"{trainer_label(trainer)} loads it with: {step.settings}", soft_wrap=True, markup=False
    )
    for line in step.assumed:
        errors.print(f"Assumed: {line}", soft_wrap=True, markup=False)
