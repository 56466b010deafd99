"""Families that are a few lines more: fused blocks of each compute what its own do, in float64, every
gradient; and rows packed in one are those rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.kernels.configs import Rung
from petune.kernels.fuse import fuse, fused_blocks
from petune.methods import tuned_parameters
from petune.methods.configs import make_config
from petune.methods.registry import tune
from petune.models import family_of
from petune.models.copied import copied
from petune.models.loading import packs
from petune.models.stack import own_stacks
from petune.tasks.registry import check_fit
from tests.kernels.fused_pairs import stand_on
from tests.kernels.own_blocks import wide
from tests.methods.family_cells import PACKED, PACKING
from tests.methods.more_models import MORE
from tests.methods.zoo import (
    MOE,
    SETTINGS,
    ZOO,
    assert_same_gradients,
    batch,
    gradients,
    stir,
    table,
    tiny,
)

# of what norms and softmax are in float32, whatever the model is
CLOSE = dict.fromkeys(MORE, 1e-6) | dict.fromkeys(("mt5-seq2seq", "qwen3_5-causal"), 5e-6)
RUNGS: dict[str, Any] = {"full": Rung("all"), "lora": Rung("attention"), "adapter": Rung("input")}


def tuned(name: str, method: str = "lora", **changes: Any) -> nn.Module:
    """A model of the zoo in float64, nothing in it at identity."""
    model = tiny(name, **changes).double()
    if name in MOE:
        model.set_experts_implementation("eager")  # transformers' loop over experts, in any dtype
    tune(model, make_config(method, SETTINGS[method]))
    stir(model, std=0.1)
    return model.train()


def fused(model: nn.Module) -> nn.Module:
    """A copy of it with fused blocks."""
    made = copied(model)
    done = fuse(made, family_of(made), "reference")
    assert done.blocks and not done.reasons, done.reasons
    return made


def assert_alike(made: nn.Module, plain: nn.Module, inputs: dict[str, Tensor], close: float = 1e-6) -> None:
    """Equal losses and gradients."""
    inputs = wide(inputs)
    loss, found = gradients(made, inputs)
    expected, wanted = gradients(plain, inputs)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert_same_gradients(found, wanted, close)
    assert not (said := [block.spec.said for block in fused_blocks(made) if block.spec.said]), said


@pytest.mark.crossed(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", RUNGS)
@pytest.mark.parametrize("name", MORE)
def test_fused_blocks_compute_what_the_family_s_own_do(name: str, method: str) -> None:
    plain = tuned(name, method)
    made = fused(plain)
    stand_on(made, RUNGS[method])
    assert_alike(made, plain, batch(name, rows=2), CLOSE[name])
    whole = {key: value for key, value in batch(name, length=11).items() if key != "attention_mask"}
    assert_alike(made, plain, whole, CLOSE[name])  # no mask at all: who sees whom is the table's word


@pytest.mark.parametrize("name", PACKED)
def test_rows_packed_in_one_have_the_loss_and_the_gradients_of_rows_by_themselves(name: str) -> None:
    model = tuned(name)
    lengths, ids = (5, 8), batch(name, rows=1, length=13)["input_ids"]
    apart, whole = [], dict[str, Tensor]()
    for row in ids.split(lengths, 1):
        loss, found = gradients(model, {"input_ids": row, "labels": row})
        apart.append(float(loss) * (row.shape[1] - 1))
        whole = {key: whole.get(key, 0) + value * (row.shape[1] - 1) for key, value in found.items()}
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    for one in (model, fused(model)):
        loss, found = gradients(
            one, {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}
        )
        count = sum(lengths) - len(lengths)
        assert float(loss) * count == pytest.approx(sum(apart), rel=1e-6)
        assert_same_gradients({key: value * count for key, value in found.items()}, whole, 1e-5)


def test_the_update_of_a_gate_and_up_in_one_is_not_left_to_the_activation() -> None:
    """Its kernels add a factor for each half, and this is one for both."""
    found = [block.spec.defers for name in ("phi3-causal", "granite-causal") for block in _blocks(name)]
    assert found == [False, False, True, True]


def _blocks(name: str) -> list[Any]:
    return fused_blocks(fused(tuned(name)))


def test_a_model_whose_mask_does_not_know_packed_samples_is_refused_them() -> None:
    configs = {name: (ZOO | MOE)[name][1:] for name in PACKING}
    found = [name for name, (config, values) in configs.items() if not packs(config(**values))]
    assert {table(name).name for name in found} == {"opt", "t5gemma", "gpt_oss"}
    with pytest.raises(UsageError, match=r"would see one another(.|\n)*data.packing to false"):
        check_fit("causal", "decoder", True, False)


def test_its_fused_blocks_let_such_samples_see_one_another_as_it_does() -> None:
    plain, ids = tuned("opt-causal"), batch("opt-causal", rows=1, length=13)["input_ids"]
    inputs = {
        "input_ids": ids,
        "position_ids": (torch.arange(13) % 8)[None],
        "labels": ids,
        "use_cache": False,
    }
    assert_alike(fused(plain), plain, inputs, CLOSE["opt-causal"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_that_are_counted_along_the_mask_are_those_of_the_tokens(side: str) -> None:
    plain = tuned("opt-causal")
    inputs = batch("opt-causal", rows=2)
    if side == "left":
        inputs = {key: value.flip(1) for key, value in inputs.items()}
    assert_alike(fused(plain), plain, inputs)


def test_the_tuned_start_as_their_base_does_under_fused_blocks() -> None:
    for name in MORE:
        base, model = tiny(name).double(), tiny(name).double()
        tune(model, make_config("lora", SETTINGS["lora"]))
        assert fuse(model, family_of(model), "reference").blocks and tuned_parameters(model)
        own_stacks(base, table(name))
        inputs = wide(batch(name, rows=2))
        with torch.no_grad():
            found, expected = model(**inputs).logits, base(**inputs).logits
        seen = slice(None) if name.endswith(("classify", "seq2seq")) else inputs["attention_mask"].bool()
        torch.testing.assert_close(found[seen], expected[seen], rtol=0, atol=CLOSE[name])
