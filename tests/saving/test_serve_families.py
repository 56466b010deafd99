"""LoRA of every family in files: peft computes what was trained from what is saved, and each server is
written it, or it is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import petune
from petune.errors import UsageError
from petune.methods import wrap
from petune.saving.serve import CLOSE, write_for
from tests.methods.family_cells import ALONE, EXPORTED, MISREAD, SERVED, UNSERVED
from tests.methods.peft_twins import assert_close, read_by_peft
from tests.methods.zoo import batch, stir, tiny


def tuned(name: str) -> Any:
    """Its model with LoRA that computes something."""
    model = wrap(tiny(name, **ALONE.get(name, {})), r=2, also_train=())
    stir(model, std=0.1)
    return model.eval()


@pytest.mark.parametrize("name", EXPORTED)
def test_peft_computes_what_was_trained(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tuned(name)
    petune.save(model, tmp_path / "tuned")
    assert "does not read this folder right" not in caplog.text
    theirs = read_by_peft(name, tmp_path / "tuned", **ALONE.get(name, {})).eval()
    with torch.no_grad():
        found, expected = model(**batch(name)).logits, theirs(**batch(name)).logits
        assert_close(found, expected)
        base = tiny(name, **ALONE.get(name, {}))(**batch(name)).logits
    assert float((found - base).abs().max()) > 1e-2


@pytest.mark.parametrize("name", MISREAD)
def test_what_peft_would_misread_is_said_and_petune_reads_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tuned(name)
    petune.save(model, tmp_path / "tuned")
    assert "does not read this folder right" in caplog.text
    with pytest.raises((RuntimeError, AssertionError)):
        read_by_peft(name, tmp_path / "tuned")
    again = petune.load(tiny(name), tmp_path / "tuned").eval()
    assert torch.equal(again(**batch(name)).logits, model(**batch(name)).logits)


@pytest.mark.parametrize(("to", "name"), SERVED)
def test_a_server_computes_what_was_trained(to: str, name: str, tmp_path: Path) -> None:
    assert write_for(to, tuned(name), tmp_path / "served", base_name="org/base").logits <= CLOSE


@pytest.mark.parametrize(("to", "name"), UNSERVED)
def test_what_no_server_is_known_to_load_is_refused_in_words(to: str, name: str, tmp_path: Path) -> None:
    words = r"not known to load LoRA for a|LoRA of these (experts|modules)|Conv1D"
    with pytest.raises(UsageError, match=words) as caught:
        write_for(to, tuned(name), tmp_path / "served", base_name="org/base")
    assert caught.value.problems[0].remedy and not any(tmp_path.iterdir())
