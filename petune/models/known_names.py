"""Names in a config that transformers looks up in a table: activations, and kinds of rotary positions. One
that stands in no table would end the building of the model, or its first pass, in a KeyError."""

from __future__ import annotations

from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from petune.errors import FileError, Problem, nearest
from petune.models import FAMILIES
from petune.models.trust import walk

_ACTIVATIONS = ("act", "act_fn", "activation", "activation_function")  # ends of the fields' names
_ROPES = ("default", *ROPE_INIT_FUNCTIONS)


def of_known_names(config: Any, place: str) -> Any:
    """The config of transformers itself. Raises FileError where one of a family that petune knows names what
    no table has (first ten)."""
    if config.model_type not in FAMILIES:
        return config
    problems = []
    for path, key, value in walk(config.to_dict()):
        known: tuple[str, ...] = ()
        if key == "rope_type":
            known = _ROPES
        elif key in _ACTIVATIONS or key.endswith(tuple(f"_{end}" for end in _ACTIVATIONS)):
            known = tuple(ACT2FN)
        if known and isinstance(value, str) and value not in known:
            near = nearest(value, known, 3) or known
            what = "transformers has nothing of this name"
            problems.append(Problem(what, f"{place}  {path}", " or ".join(near), repr(value)[:80]))
    if problems:
        raise FileError(problems[:10])
    return config
