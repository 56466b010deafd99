"""`petune export`: write a run in the layout that another library reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from petune_cli.arguments import Given, VerifyBase, Words
from petune_cli.echo import echo

if TYPE_CHECKING:
    from petune.run.finished import Run

Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default inside the run folder.")
]
OverwriteFolder = Annotated[bool, typer.Option("--overwrite", help="Replace the folder that is there.")]


# who is to read the files
ExportTarget = Literal[
    "peft", "adapters", "hf", "bitsandbytes", "vllm", "sglang", "llamacpp", "gguf", "ollama"
]


def export(
    words: Words = None,
    to: Annotated[
        ExportTarget,
        typer.Option(
            "--to",
            help=(
                "peft: lora, dora, ia3, miss as peft reads them; adapters: adapter as AdapterHub's library"
                " reads it; hf: a merged model; bitsandbytes: the base of a run in nf4, in four bits; else"
                " lora as a server loads it."
            ),
        ),
    ] = ...,  # type: ignore[assignment]  # typer's word for an option that must be given
    out: Out = None,
    overwrite: OverwriteFolder = False,
    verify_base: VerifyBase = False,
) -> None:
    """Write a run for peft, for transformers or for a server."""
    run = Given.of(words).run(verify_base=verify_base)
    place = run.export(to, out, overwrite=overwrite)
    if run.serve_report:
        return echo(f"{place}\n   {run.serve_report}")
    if to == "adapters":
        return echo(f"{place}\n   load it with model.load_adapter({str(place)!r}, use_safetensors=True)")
    tell_place(run, place, "peft.PeftModel.from_pretrained(base, " if to == "peft" else None)


def tell_place(run: Run, place: Path, reader: str | None = None) -> None:
    """Where the files are, what merging cost in precision if it was done, and how they are read: by
    transformers, or by `reader`."""
    from petune.run.readme import class_of

    reader = reader or f"{class_of(place, run.summary)}.from_pretrained("
    report = [f"   {run.merge_report}"] if run.merge_report else []
    echo("\n".join([str(place), *report, f"   load it with {reader}{str(place)!r})"]))
