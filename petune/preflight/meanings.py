"""Rules that say what a value of another program means in a recipe: functions of the value, made by a few
words. Torch-free.

A rule gives the recipe's keys that the value means: none where petune does so anyway, None where that value
has no counterpart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Meaning = Mapping[str, Any] | None
KeyRule = Callable[[Any], Meaning]  # of a value of another program's key
KeyTable = dict[str, KeyRule]
ALPACA, SHAREGPT = {"data.format": "alpaca"}, {"data.format": "sharegpt"}


def number(value: Any) -> float | int | None:
    """A number, also one that YAML took for text (2e-5); None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(found) if found.is_integer() and "e" not in str(value).lower() else found


def names(value: Any) -> list[str] | None:
    """A list of names, also one in a text between commas; None for anything else."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        return None
    return [name.strip() for name in found]


def single(value: Any) -> str | None:
    """A name, or the only one of a list; None for several and for anything else."""
    found = names(value)
    return found[0] if found and len(found) == 1 else None


def path(value: Any) -> str | None:
    """The only one of a list that can be a path or a hub id; None for a bare name and for anything else."""
    return found if (found := single(value)) and re.search(r"[/.\\]", found) else None


def text(value: Any) -> str | None:
    """A text; None for anything else."""
    return value if isinstance(value, str) and value else None


def truth(value: Any) -> bool | None:
    """True or false; None for anything else."""
    return value if isinstance(value, bool) else None


def as_it_is(value: Any) -> Any:
    """Any value."""
    return value


def to(key: str, read: Callable[[Any], Any] = number) -> KeyRule:
    """The value, under another key."""
    return lambda value: None if (found := read(value)) is None else {key: found}


def one_of(**meanings: Meaning) -> KeyRule:
    """What a value means, by its text."""
    return lambda value: meanings.get(str(value).lower())


def already(*values: Any) -> KeyRule:
    """Values that ask for what petune does anyway."""
    return lambda value: {} if any(type(value) is type(one) and value == one for one in values) else None


def off(value: Any) -> Meaning:
    """Nothing is asked for: null, false, none, an empty text or list."""
    return {} if value in (None, False, "", "none", [], {}) else None


def switch(on: Mapping[str, Any]) -> KeyRule:
    """true means `on`; what is off means nothing."""
    return lambda value: on if value is True else off(value)


def either(*rules: KeyRule) -> KeyRule:
    """The first rule that knows the value."""
    return lambda value: next((found for rule in rules if (found := rule(value)) is not None), None)


def clipping(value: Any) -> Meaning:
    """The largest norm; 0 is none."""
    found = number(value)
    return {"clip": found or None} if found is not None else None


def split(value: Any) -> Meaning:
    """The name of a split; a slice of one has no counterpart."""
    return {"data.split_of": value} if isinstance(value, str) and value.isidentifier() else None


def share(value: Any) -> Meaning:
    """A share of the rows to hold out; a number of rows has no counterpart."""
    found = number(value)
    return {"data.split": found} if found is not None and 0 < found < 1 else None


def targets(value: Any) -> Meaning:
    """Names of linears, `all` and its kin for all of them, or a regex."""
    if str(value).lower() in ("all", "all-linear"):
        return {"method.targets": "all-linear"}
    if isinstance(value, str) and not _plain(value):
        return {"method.targets": value}
    found = names(value)
    return {"method.targets": found} if found else None


def leaves(value: Any) -> Meaning:
    """Names of linears to leave out; a regex has no counterpart."""
    found = names(value)
    return {"method.exclude": found} if found and all(map(_plain, found)) else None


def _plain(value: str) -> bool:
    """Whether a text is names between commas, and no regex."""
    return all(name.strip().replace(".", "_").isidentifier() for name in value.split(","))


def assistant(value: Any) -> Meaning:
    """Roles whose turns are trained; petune trains those of the assistant."""
    found = names(value)
    return {} if found and set(found) <= {"assistant", "gpt"} else None


def fields_of_turns(value: Any) -> Meaning:
    """What a turn's fields are called, by what they are: those of a format."""
    known: tuple[tuple[str, str, Meaning], ...] = (("role", "content", {}), ("from", "value", SHAREGPT))
    return next((found for who, says, found in known if value == {"role": who, "content": says}), None)


def trackers(value: Any) -> Meaning:
    """Names of trackers."""
    found = names(value)
    known = found is not None and found != ["all"]
    return {"trackers": [name for name in found or () if name != "none"]} if known else None


def steps(key: str) -> KeyRule:
    """A number of steps; a share of them has no counterpart."""
    return lambda value: {key: found} if isinstance(found := number(value), int) and found >= 1 else None


def component(value: Any) -> Meaning:
    """torchtune's builder of a model: lora_llama3_1_8b, llama3_1_8b, ...; qlora_ holds the base in NF4."""
    name = str(value).rpartition(".")[2]
    if name.startswith("qlora_"):
        return {"method.name": "lora", "base_dtype": "nf4"}
    if name.startswith(("dora_qlora", "qdora_")):
        return None
    return {"method.name": "lora" if name.startswith("lora_") else "full"}


def attention(value: Any) -> Meaning:
    """torchtune's names of the linears of attention."""
    found = names(value)
    return (
        None if found is None else {"method.also": [name.replace("output_proj", "o_proj") for name in found]}
    )


DATASET: KeyTable = {  # of LLaMA-Factory: its name, or what dataset_info.json says of it
    "dataset": to("data.path", path),
    **dict.fromkeys(("dataset.file_name", "dataset.hf_hub_url"), to("data.path", text)),
    "dataset.subset": to("data.config", text),
    "dataset.split": split,
    "dataset.formatting": one_of(alpaca=ALPACA, sharegpt=SHAREGPT),
    "dataset.columns.messages": to("data.columns.messages", text),
}
