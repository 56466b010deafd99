"""Several adapters on one base in files: a sub-folder each, as peft reads them, and back under any name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import petune
from petune.errors import FileError, UsageError
from petune.methods import tuned_state
from petune.saving.export import save_merged, write_peft
from tests.methods.named_jobs import JOBS, NAME, ROWS, inputs, job, logits, together
from tests.methods.zoo import tiny


def test_each_is_saved_by_its_name_and_peft_computes_the_same_rows(tmp_path: Path) -> None:
    model, given = together(), inputs()
    petune.save(model, tmp_path / "all")
    assert sorted(path.name for path in (tmp_path / "all").iterdir() if path.is_dir()) == sorted(JOBS)
    theirs: Any = peft.PeftModel.from_pretrained(tiny(NAME), str(tmp_path / "all" / "a"), adapter_name="a")
    (
        theirs.load_adapter(str(tmp_path / "all" / "b"), "b"),
        theirs.load_adapter(str(tmp_path / "all" / "c"), "c"),
    )
    expected = theirs.eval()(**given, adapter_names=[name or "__base__" for name in ROWS]).logits
    with petune.per_row(model, ROWS):
        torch.testing.assert_close(logits(model, given), expected, rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    read = tiny(NAME)
    for name in JOBS:
        petune.add(read, name, folder=tmp_path / "theirs" / name)
    assert all(torch.equal(value, tuned_state(model)[name]) for name, value in tuned_state(read).items())


def test_a_folder_of_several_is_read_whole_or_one_of_it(tmp_path: Path) -> None:
    model, given = together(), inputs()
    petune.save(model, tmp_path / "all")
    with pytest.raises(UsageError, match="occupied"):
        petune.save(model, tmp_path / "all")
    petune.save(model, tmp_path / "all", overwrite=True)
    again = petune.load(tiny(NAME), tmp_path / "all")
    assert list(again.petune_tuning.adapters) == sorted(JOBS)
    state = tuned_state(model)
    assert {name: value.tolist() for name, value in tuned_state(again).items()} == {
        name: value.tolist() for name, value in state.items()
    }
    with pytest.raises(FileError, match="stores no hash of its base"):
        petune.load(tiny(NAME), tmp_path / "all", verify_base=True)
    one = petune.load(tiny(NAME), tmp_path / "all" / "b")
    torch.testing.assert_close(logits(one, given), logits(job("b"), given), rtol=1e-5, atol=1e-5)
    renamed = petune.add(petune.add(tiny(NAME), "fresh"), "old", folder=tmp_path / "all" / "b")
    with petune.active(renamed, "old"):
        torch.testing.assert_close(logits(renamed, given), logits(job("b"), given), rtol=1e-5, atol=1e-5)


def test_a_transformers_checkpoint_of_several_is_read_back(tmp_path: Path) -> None:
    model, given = together(), inputs()
    model.save_pretrained(tmp_path / "checkpoint")
    again = petune.load(tiny(NAME), tmp_path / "checkpoint")
    petune.active(again, "c"), petune.active(model, "c")
    assert torch.equal(logits(again, given), logits(model, given))


def test_alone_one_is_written_as_if_it_were_the_only_one(tmp_path: Path) -> None:
    model, given = together(), inputs()
    for write in (write_peft, save_merged):
        with pytest.raises(UsageError, match="several adapters"):
            write(model, tmp_path / "refused")
    with petune.alone(model, "c"):
        write_peft(model, tmp_path / "peft")
        assert save_merged(model, tmp_path / "merged").layers == 4
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["use_rslora"]
    theirs: Any = peft.PeftModel.from_pretrained(tiny(NAME), str(tmp_path / "peft"))
    torch.testing.assert_close(logits(theirs, given), logits(job("c"), given), rtol=1e-4, atol=1e-5)


def test_what_is_damaged_or_trained_beside_is_refused_before_a_layer_is_changed(tmp_path: Path) -> None:
    petune.save(together(), tmp_path / "all")
    (tmp_path / "all" / "b" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(FileError):
        petune.load(tiny(NAME), tmp_path / "all")
    dora = petune.save(petune.wrap(tiny(NAME), "dora"), tmp_path / "dora")
    headed = petune.save(petune.wrap(tiny(NAME), also_train=["lm_head"]), tmp_path / "headed")
    model = petune.add(tiny(NAME), "a")
    before = logits(model, inputs())
    for folder, match in (
        (dora, "dora has no sum"),
        (headed, "lm_head.weight is trained|lm_head is trained"),
    ):
        with pytest.raises(UsageError, match=match):
            petune.add(model, "x", folder=folder)
    with pytest.raises(UsageError, match="says its settings itself"):
        petune.add(model, "x", folder=dora, r=4)
    assert torch.equal(logits(model, inputs()), before) and list(model.petune_tuning.adapters) == ["a"]
