"""The README.md that a finished run leaves in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from petune.methods.configs import method_of
from petune.models.heads import AUTO_OF, Head
from petune.models.multimodal import whole_at
from petune.models.source import ModelSource, resolve_model
from petune.recipe import Recipe
from petune.run.build import choose_place
from petune.tasks import TASKS
from petune.tasks.media import read_in

_LOADING = {  # by the layout of the method's files, or by what the base is
    "peft": (
        'base = {auto}.from_pretrained({base})\nmodel = petune.load({name}, "{out}/tuned")   # peft.PeftModel'
        " reads it too"
    ),
    "transformers": 'model = {auto}.from_pretrained("{out}/tuned")',
    "petune": 'base = {auto}.from_pretrained({base})\nmodel = petune.load({name}, "{out}/tuned")',
    "object": (
        '# base: the model that petune.train was given, untouched\nmodel = petune.load(base, "{out}/tuned")'
    ),
    "random": (
        "# the base is random weights, made again from the recipe and its seed\nmodel ="
        ' petune.load_run("{out}").speaker.model'
    ),
}
# reads a checkpoint of several modalities, of which a text model is a part
OF_WHOLE = "transformers.AutoModelForImageTextToText"
_LAYOUTS = {"peft": "peft's layout", "transformers": "a Hugging Face folder", "petune": "petune's layout"}


def readme(recipe: Recipe, out: Path, summary: Mapping[str, Any]) -> str:
    """The README.md of a finished run: its scores, the lines that load what was tuned, and what lies
    where."""
    method, source = recipe.method_name, resolve_model(recipe.model, recipe.folder)
    options = {"revision": source.revision, "dtype": str(choose_place(recipe).dtype).removeprefix("torch.")}
    options |= {"num_labels": summary.get("num_labels")}
    base = ", ".join(
        [
            json.dumps(source.place),
            *(f"{name}={json.dumps(value)}" for name, value in options.items() if value),
        ]
    )
    files = method_of(recipe.method).files
    form = (
        files if files == "transformers" else {"config": "random", "object": "object"}.get(source.kind, files)
    )
    whole = whole_at(source) is not None and form != "transformers"
    auto, name = (OF_WHOLE, "petune.text_model(base)") if whole else (auto_class(summary), "base")
    code = _LOADING[form].format(auto=auto, out=out, base=base, name=name)
    metric = summary["metric"]
    before, after = summary["before"].get(metric), summary["after"].get(metric)
    warned = "".join(f"\n**Note:** {line}.\n" for line in summary.get("notes", ()))
    warned += "".join(f"\n**Warning:** {line}.\n" for line in summary["warnings"])
    return f"""# {recipe.name}: {recipe.model} tuned with {method}

{metric}: {before:.4f} on the untouched base, {after:.4f} tuned ({summary["steps"]} steps, {summary["seconds"]} s).
{warned}
```python
import petune, transformers
{code}
```

| file | what it is |
|---|---|
| tuned/ | the tuned weights with what makes their inputs (tokenizer, chat template, image processor) and head ({_LAYOUTS[files]}); the best evaluated state |
| recipe.yaml, resolved.yaml | the recipe as it was written; every setting it meant |
| metrics.jsonl, loss.png | one line per step and per evaluation; the curve |
| report.html | the run as one page, which needs no network |
| run.log, env.json | everything the run said; versions and machine |
| setup.json | method, data, steps and plan, as they were before the first step |
| checkpoints/step-N/, best | resumable states, whole or absent; which is the best |
| summary.json | scores before and after, warnings, time, tokens, memory |
"""


def auto_class(summary: Mapping[str, Any]) -> str:
    """The class of transformers that reads the model of a run with this summary, as it is written in a line
    of Python. Runs from before pictures could be read say nothing of the format of their rows."""
    kind, head = read_in(str(summary.get("format", "text"))), cast(Head, TASKS[summary["task"]].head)
    return f"transformers.{AUTO_OF[kind][head].__name__}"


def class_of(folder: Path, summary: Mapping[str, Any]) -> str:
    """The class of transformers that reads the merged model of such a run in `folder`."""
    whole = whole_at(ModelSource(str(folder), "folder", str(folder), None, ""))
    return auto_class(summary) if whole is None else OF_WHOLE
