"""DeBERTa beside transformers: scores of positions in every form, layers that are called twice in a pass,
dropout of a table that all rows share, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DebertaV2ForMaskedLM, DebertaV2Model

import petune
from petune.errors import UsageError
from petune.kernels.dispatch import reference_ops
from petune.kernels.head.hooks import fuse_head
from petune.methods import merge, wrap
from petune.models import FAMILIES, attention
from petune.models.loading import load_model
from petune.models.source import resolve_model
from petune.models.stack import own_stacks
from petune.parallel.configs import CutConfig, ParallelConfig, PpConfig
from petune.parallel.planning import make_plan
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny
from tests.parallel.cells import case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS

FAMILY = FAMILIES["deberta-v2"]
NAMES = ("deberta-classify", "deberta2-mlm")
FORMS: dict[str, dict[str, Any]] = {
    "shared": {},
    "c2p": {"pos_att_type": "c2p"},
    "p2c": {"pos_att_type": "p2c", "share_att_key": False},
    "no positions": {"relative_attention": False, "pos_att_type": None},
    "heads of a said width": {"attention_head_size": 8},
    "convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
}


def owned(model: Any) -> Any:
    """With petune's stacks and its way of attending."""
    attention.use(model, FAMILY)
    own_stacks(model, FAMILY)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_transformers(form: str) -> None:
    """Rows that are padded and longer than the table has positions."""
    model = tiny("deberta-classify", **FORMS[form]).double()
    inputs = batch("deberta-classify", length=21)
    expected = gradients(model, inputs)
    found = gradients(owned(model), inputs)
    assert torch.equal(found[0], expected[0])
    assert_same_gradients(found[1], expected[1], 1e-12)


@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_factors_get_the_gradients_of_both_calls_of_their_layer(name: str, kernels: str) -> None:
    """By the chain rule from those of the merged weights: dA = s B^T dW and dB = s dW A^T."""
    tuned = wrap(tiny(name).double(), "lora", r=4, also_train=(), kernels=kernels)
    stir(tuned, std=0.1)
    _, found = gradients(tuned, batch(name))
    _, dense = gradients(merge(copy.deepcopy(tuned)), batch(name))
    layers = [path for path, layer in tuned.named_modules() if hasattr(layer, "lora_A")]
    assert sum(".attention.self." in path for path in layers) == 2 * (3 if name == NAMES[0] else 5)
    for path in layers:
        layer, change = tuned.get_submodule(path), dense[f"{path}.weight"]
        expected = {"lora_A": layer.scale * layer.lora_B.T @ change}
        expected["lora_B"] = layer.scale * change @ layer.lora_A.T
        for own, value in expected.items():
            assert torch.allclose(found[f"{path}.{own}"], value, rtol=1e-9, atol=1e-12), (path, own)


@pytest.mark.parametrize("method", ["dora", "ia3", "miss"])
def test_other_methods_merge_to_what_they_trained(method: str) -> None:
    tuned = wrap(tiny(NAMES[0]), method, **({} if method == "ia3" else {"r": 4}))
    stir(tuned, std=0.1)
    expected = tuned(**batch(NAMES[0])).logits
    assert torch.allclose(merge(tuned)(**batch(NAMES[0])).logits, expected, atol=1e-5)


# ---------------------------------------------------------------- dropout


def answers(model: nn.Module, inputs: dict[str, Tensor], rows: list[int]) -> Tensor:
    """The logits of these rows in training."""
    here = Running(rows=torch.tensor(rows), key=step_key(1, 2))
    with drawing(here):
        found: Tensor = model(**{name: value[rows] for name, value in inputs.items()}).logits
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_row_drops_out_alike_whatever_rows_are_beside_it(name: str) -> None:
    """Also in LoRA's factors, through which the table goes."""
    rates = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    model = wrap(tiny(name, **rates), "lora", r=4, dropout=0.3, kernels="off")
    stir(model, std=0.1)
    model = owned(model).train()
    inputs = batch(name, rows=4)
    together = answers(model, inputs, [0, 1, 2, 3])
    for rows in ([0], [2, 1], [3]):
        assert torch.allclose(answers(model, inputs, rows), together[rows], atol=1e-5)
    assert not torch.allclose(together, model.eval()(**inputs).logits, atol=1e-2)


@pytest.mark.parametrize(
    ("method", "backend", "name"),
    [("lora", "tp", NAMES[0]), ("full", "pp-1f1b", NAMES[1]), ("full", "galaxy", NAMES[0])],
)
def test_ranks_drop_out_as_one_process_does(method: str, backend: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), recompute=True, dropout=0.1, steps=1))


def test_fused_linears_are_called_twice_where_heads_are_cut() -> None:
    check(case(NAMES[0], "lora", BACKENDS["tp"](NAMES[0], 2), steps=1, fused=True))


# ---------------------------------------------------------------- refused


CUT, PP = CutConfig(size=2), PpConfig(size=2)


@pytest.mark.parametrize(
    ("plan", "changes", "reason"),
    [
        (ParallelConfig(sp=CUT), {}, "scores the positions of all tokens itself"),
        (ParallelConfig(tp=CutConfig(size=2, overlap=True)), {}, "overlap does not know"),
        (ParallelConfig(galaxy=CUT), {"conv_kernel_size": 3}, "tokens meet between its blocks"),
        (ParallelConfig(pp=PP), {"conv_kernel_size": 3}, "tokens meet between its blocks"),
        (ParallelConfig(pp=PP), {"legacy": False}, "asks the embedding, on another stage, for its table"),
    ],
)
def test_a_plan_is_refused_with_its_reason(
    plan: ParallelConfig, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        make_plan(plan, FAMILY, tiny(NAMES[0], **changes).config, None, 8)


def test_a_side_network_has_no_own_tokens() -> None:
    with pytest.raises(Exception, match="a side network has own tokens here"):
        check(case(NAMES[0], "side", BACKENDS["galaxy"](NAMES[0], 2), steps=1))


def test_rows_with_adapters_of_their_own_are_refused() -> None:
    """The table would go through the adapters of all of them."""
    model = tiny(NAMES[0])
    petune.add(model, "one", "lora", r=2, also_train=())
    with petune.per_row(model, ["one", None, None]), pytest.raises(UsageError, match="DeBERTa"):
        model(**batch(NAMES[0]))


# ---------------------------------------------------------------- heads of masked words


def test_a_head_that_asks_the_embedding_for_its_table_makes_its_own_loss() -> None:
    assert fuse_head(tiny(NAMES[1]), reference_ops())
    assert not fuse_head(tiny(NAMES[1], legacy=False), reference_ops())
    tuned = [wrap(tiny(NAMES[1], legacy=False), "lora", r=4, kernels=how) for how in ("off", "reference")]
    expected, found = (gradients(model.train(), batch(NAMES[1])) for model in tuned)
    assert_same_gradients(found[1], expected[1])


@pytest.mark.parametrize("legacy", [True, False])
def test_a_checkpoint_without_a_head_gets_one_that_trains(legacy: bool, tmp_path: Path) -> None:
    config = tiny(NAMES[1], legacy=legacy).config
    DebertaV2Model(config).save_pretrained(tmp_path)
    loaded = load_model(resolve_model(str(tmp_path), tmp_path), "mlm", None, torch.float32)
    assert type(loaded.read()) is DebertaV2ForMaskedLM
    assert any(name.endswith("transform" if legacy else "lm_head") for name in loaded.new)
