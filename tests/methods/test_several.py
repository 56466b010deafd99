"""Several adapters on one base: rows meet their own alone, trained together as each would be alone, and what
does not go with it is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petune
from petune.errors import UsageError
from petune.methods import several, tuned_parameters, tuned_state, without_tuning
from petune.methods.several import SeveralLayer
from tests.methods.named_jobs import (
    NAME,
    ROWS,
    assert_rows_meet_their_own,
    assert_trained_as_alone,
    inputs,
    job,
    logits,
    together,
)
from tests.methods.zoo import GENERATE, batch, prompt, stir, tiny


def test_added_adapters_start_as_the_base_and_leave_its_names() -> None:
    base, model = tiny(NAME), petune.add(petune.add(tiny(NAME), "a", r=4), "b", targets=["q"])
    assert base.state_dict().keys() == {name for name in model.state_dict() if ".updates." not in name}
    with torch.no_grad(), petune.active(model, ["a", "b"]):
        assert torch.equal(logits(model, inputs()), logits(base, inputs()))
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trained == set(tuned_state(model)) and all(".updates." in name for name in trained)


@pytest.mark.parametrize("model", [NAME, "t5-seq2seq", "bart-seq2seq"])
def test_every_row_of_a_batch_meets_its_own_adapter_alone(model: str) -> None:
    assert_rows_meet_their_own(model)


def test_trained_together_they_are_what_each_is_trained_alone() -> None:
    assert_trained_as_alone()


def test_a_row_that_overflows_spoils_no_other_adapter() -> None:
    model, given = together(), inputs()
    embedded = model.get_input_embeddings()(given["input_ids"]).detach()
    embedded[0] = torch.inf  # the row of b
    with petune.per_row(model, ROWS):
        found = model(inputs_embeds=embedded, attention_mask=given["attention_mask"]).logits
    found[1:].square().mean().backward()
    with petune.alone(model, "a"):
        assert all(
            value.grad is not None and value.grad.isfinite().all()
            for value in tuned_parameters(model).values()
        )


@pytest.mark.slow
@pytest.mark.crossed(1)
@pytest.mark.parametrize("model", [NAME, "t5-seq2seq"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_answers_each_row_by_its_own_adapter(model: str, beams: int) -> None:
    found, names = together(model), ("c", None, "b")
    asked: dict[str, Any] = {**prompt(model), **GENERATE, "num_beams": beams}
    with petune.per_row(found, names, beams=beams):
        answers = found.generate(**asked)
    for at, name in enumerate(names):
        alone = tiny(model) if name is None else job(name, model)
        own = {
            key: value[at : at + 1] if isinstance(value, Tensor) else value for key, value in asked.items()
        }
        assert torch.equal(alone.generate(**own)[0], answers[at])


def test_active_adapters_are_summed_on_every_row_until_the_block_ends() -> None:
    model, given = together(), inputs()
    first, base = logits(model, given), logits(tiny(NAME), given)
    torch.testing.assert_close(first, logits(job("a"), given), rtol=1e-5, atol=1e-5)
    with petune.active(model, ["b", "c"]):
        both = logits(model, given)
        with petune.active(model, []):
            assert torch.equal(logits(model, given), base)
        assert torch.equal(logits(model, given), both)
    assert torch.equal(logits(model, given), first)
    plain = job("b")
    for name, layer in model.named_modules():
        if isinstance(layer, SeveralLayer) and "c" in layer.updates:
            own = plain.get_submodule(name)
            own.weight = nn.Parameter(own.weight + layer.alone("c").delta())  # type: ignore[operator]
    torch.testing.assert_close(both, logits(plain, given), rtol=1e-5, atol=1e-5)
    petune.active(model, "b")
    torch.testing.assert_close(logits(model, given), logits(job("b"), given), rtol=1e-5, atol=1e-5)
    with without_tuning(model):
        assert torch.equal(logits(model, given), base)


def test_a_copy_chooses_for_itself_and_dropout_acts_in_training_alone() -> None:
    model = petune.add(petune.add(tiny(NAME), "a", dropout=0.5), "b", dropout=0.5)
    stir(model)
    other, given = deepcopy(model), inputs()
    petune.active(other, "b")
    assert torch.equal(logits(model, given), logits(deepcopy(model), given))
    assert not torch.equal(logits(model, given), logits(other, given))
    with petune.per_row(model.train(), ["a", "b", "a", "b", "a"]):
        assert not torch.equal(logits(model, given), logits(model, given))


def test_a_mode_set_while_one_is_alone_holds_for_all() -> None:
    model = together().train()
    with petune.alone(model, "b"):
        model.eval()
    assert not any(module.training for module in model.modules())


def test_one_is_merged_and_the_others_are_gone() -> None:
    model, given = together(), inputs()
    with petune.active(model, "c"):
        expected = logits(model, given)
    plain = petune.merge(model, "c")
    assert not any(isinstance(module, SeveralLayer) for module in plain.modules())
    torch.testing.assert_close(logits(plain, given), expected, rtol=1e-4, atol=1e-5)


REFUSED: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "dora": (lambda model: petune.add(model, "x", "dora"), "LoRA alone"),
    "another method": (lambda model: petune.add(model, "x", "adapter"), "LoRA alone"),
    "a head": (lambda model: petune.add(model, "x", also_train=["lm_head"]), "lm_head trained whole"),
    "biases": (lambda model: petune.add(model, "x", bias="all"), "bias does not go"),
    "token rows": (lambda model: petune.add(model, "x", token_rows=[3]), "token_rows does not go"),
    "pissa": (lambda model: petune.add(model, "x", init="pissa"), "init does not go"),
    "lora+": (lambda model: petune.add(model, "x", lr_ratio=4.0), "lr_ratio does not go"),
    "an embedding": (lambda model: petune.add(model, "x", targets=["embed_tokens"]), "share a Embedding"),
    "a name that is taken": (lambda model: petune.add(model, "a"), "there is an adapter of this name"),
    "a name with a dot": (lambda model: petune.add(model, "a.b"), "cannot name an adapter"),
    "a target of nothing": (lambda model: petune.add(model, "x", targets=["nowhere"]), "matches no module"),
    "a second wrap": (lambda model: petune.wrap(model), "wrapped already"),
    "an unknown adapter": (lambda model: petune.active(model, ["x"]), "no adapter of this name"),
    "merging all": (petune.merge, "several adapters"),
    "merging all for a block": (lambda model: petune.merged_weights(model).__enter__(), "several adapters"),
    "rows that are not there": (
        lambda model: petune.per_row(model, ["a", "b"]).__enter__() or model(**inputs()),
        "a batch of 2 rows",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_go_with_several_is_refused_and_leaves_the_model(what: str) -> None:
    model, given = together(), inputs()
    before, state = logits(model, given), dict(tuned_parameters(model))
    attempt, match = REFUSED[what]
    with pytest.raises(UsageError, match=match):
        attempt(model)
    petune.active(model, "a")
    assert torch.equal(logits(model, given), before)
    assert all(value is state[name] for name, value in tuned_parameters(model).items())


def test_a_wrapped_model_and_one_without_names_are_refused() -> None:
    with pytest.raises(UsageError, match="wrapped, with one tuning that has no name"):
        petune.add(petune.wrap(tiny(NAME)), "a")
    with pytest.raises(UsageError, match="experts  several adapters do not share a weight of experts"):
        petune.add(tiny("qwen3moe-causal"), "a")
    with pytest.raises(UsageError, match="no adapters by name"):
        petune.active(petune.wrap(tiny(NAME)), "a")
    with pytest.raises(UsageError, match="is not wrapped"):
        petune.per_row(tiny(NAME), ["a"])
    with pytest.raises(UsageError, match="of different dropouts"):
        model = petune.add(petune.add(tiny(NAME), "a", dropout=0.1), "b").train()
        with petune.per_row(model, ["a", "b", None]):
            model(**batch(NAME))
    with (
        pytest.raises(UsageError, match=r"merged inside alone"),
        petune.alone(petune.add(tiny(NAME), "a"), "a") as model,
    ):
        petune.merge(model)


@pytest.mark.parametrize("names", [None, 5, "a", [], [""], ["a", ""], [["a"]], ["a", 5]], ids=repr)
def test_rows_are_named_in_a_list_in_which_only_none_is_the_base(names: Any) -> None:
    model = petune.add(tiny(NAME), "a")
    with pytest.raises(UsageError, match=r"named in a list|at least one row|no adapter of this name"):
        petune.per_row(model, names)
    with pytest.raises(UsageError, match="beams 0"):
        petune.per_row(model, ["a"], beams=0)
    with pytest.raises(UsageError, match="named in a list"):
        petune.active(model, 5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot name an adapter"):
        petune.add(model, 5)  # type: ignore[arg-type]


def test_no_plan_cuts_them_and_no_block_computes_them_again() -> None:
    model = together().train()
    layer = next(layer for _, layer in several.several_layers(model))
    with pytest.raises(UsageError, match="no parallel plan"):
        layer.splits("column")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with petune.per_row(model, ROWS):
        loss = model(**inputs()).loss
    with pytest.raises(UsageError, match="cannot run again"):
        loss.backward()
