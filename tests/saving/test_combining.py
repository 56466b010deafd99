"""Several LoRAs made one: peft's `add_weighted_adapter` computes the same, files hold the result, and what
has no sum is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import petune
from petune.errors import FileError, UsageError
from petune.methods import merge, wrap
from petune.saving.combining import combine
from tests.methods.peft_twins import assert_close
from tests.methods.zoo import batch, stir, tiny

NAME = "llama-causal"


def saved(folder: Path, seed: int, **settings: Any) -> Path:
    model = wrap(tiny(NAME), **{"r": 4, "targets": ["q", "down"], **settings})
    stir(model, seed=seed, std=0.1)
    return petune.save(model, folder)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(**batch(NAME)).logits
        return found


@pytest.mark.parametrize(
    ("how", "ranks", "weights"),
    [
        ("linear", (4, 4), (0.7, -0.4)),
        ("cat", (4, 2), (0.7, -0.4)),
        ("svd", (4, 2), (0.7, 0.4)),
    ],
)
def test_it_computes_what_pefts_weighted_adapter_does(
    how: Any, ranks: tuple[int, int], weights: tuple[float, float], tmp_path: Path
) -> None:
    folders = [
        saved(tmp_path / "one", 3, r=ranks[0]),
        saved(
            tmp_path / "two", 4, r=ranks[1], alpha=7, targets=["q", "v"] if how != "linear" else ["q", "down"]
        ),
    ]
    ours = combine(tiny(NAME), dict(zip(folders, weights, strict=True)), how)
    theirs = peft.PeftModel.from_pretrained(tiny(NAME), str(folders[0]), adapter_name="one")
    theirs.load_adapter(str(folders[1]), adapter_name="two")
    theirs.base_model.add_weighted_adapter(["one", "two"], list(weights), "both", combination_type=how)
    theirs.set_adapter("both")
    assert_close(logits(ours), logits(theirs))
    petune.save(ours, tmp_path / "both")
    assert_close(logits(petune.load(tiny(NAME), tmp_path / "both")), logits(ours))
    assert float((logits(ours) - logits(tiny(NAME))).abs().max()) > 1e-2
    tuned = logits(ours)
    assert_close(logits(merge(ours)), tuned)


def test_cat_is_the_sum_and_svd_of_its_whole_rank_too(tmp_path: Path) -> None:
    folders = {saved(tmp_path / str(seed), seed): 0.5 for seed in (3, 4)}
    whole = logits(combine(tiny(NAME), folders, "cat"))
    assert_close(logits(combine(tiny(NAME), folders, "svd", r=8)), whole)
    assert float((logits(combine(tiny(NAME), folders, "svd", r=2)) - whole).abs().max()) > 1e-3


def test_folders_may_begin_with_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = [saved(tmp_path / str(seed), seed) for seed in (3, 4)]
    monkeypatch.setenv("HOME", str(tmp_path))
    found = combine(tiny(NAME), {f"~/{folder.name}": 1.0 for folder in folders})
    assert_close(logits(found), logits(combine(tiny(NAME), dict.fromkeys(folders, 1.0))))


def test_what_has_no_sum_is_refused(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", 3)
    cases: list[tuple[Path, str, str]] = [
        (saved(tmp_path / "rank", 4, r=2), "linear", "linear needs equal ranks"),
        (saved(tmp_path / "dora", 4, method="dora"), "cat", "dora has no sum"),
        (saved(tmp_path / "rows", 4, token_rows=[5]), "cat", "trained beside the factors"),
        (saved(tmp_path / "head", 4, also_train=["lm_head"]), "cat", "trained beside the factors"),
        (one, "cat", "combine takes two folders or more"),
        (saved(tmp_path / "other", 4), "mean", "combine takes two folders or more"),
    ]
    for other, how, message in cases:
        with pytest.raises(UsageError, match=message):
            combine(tiny(NAME), {one: 1.0, other: 1.0}, how)  # type: ignore[arg-type]
    with pytest.raises(FileError, match="another base model"):
        combine(tiny(NAME, seed=9), {one: 1.0, tmp_path / "other": 1.0})
    with pytest.raises(UsageError, match="is wrapped already"):
        combine(wrap(tiny(NAME), r=2), {one: 1.0, tmp_path / "other": 1.0})
