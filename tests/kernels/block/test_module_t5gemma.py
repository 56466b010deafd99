"""Fused blocks of T5Gemma: windows to both sides, tokens that no mask hides, stacks of two sizes, plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration, T5GemmaForSequenceClassification

from petune.kernels.block.attention import How
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import MemoryConfig
from petune.kernels.memory.op_cost import attention
from petune.methods import wrap
from tests.methods.more_models import T5GEMMA
from tests.methods.zoo import SETTINGS, assert_same_gradients, batch, gradients, stir
from tests.parallel.cells import case, in_part
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS

pytestmark = pytest.mark.usefixtures("standing")
NAME = "t5gemma-seq2seq"
PAD = T5GEMMA["pad_token_id"]


class Sizes(dict[str, Any]):
    """Settings of a stack that go into a case, which is a key; a dict itself has no hash. They do not
    change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(str(self))


WIDER = (("encoder", Sizes(T5GEMMA["encoder"], hidden_size=96, intermediate_size=160)),)


def pair(
    kind: Any = T5GemmaForConditionalGeneration,
    ops: str = "reference",
    device: str = "cpu",
    **changes: Any,
) -> tuple[nn.Module, nn.Module]:
    """A model under LoRA with fused blocks and with its own, nothing in it at identity."""
    made = []
    for kernels in (ops, "off"):
        torch.manual_seed(0)
        model = kind(T5GemmaConfig(**{**T5GEMMA, **changes})).to(device)
        made.append(wrap(model, "lora", kernels=kernels, **SETTINGS["lora"]).train())
        stir(made[-1], std=0.1)
    return made[0], made[1]


def assert_alike(fused: nn.Module, plain: nn.Module, inputs: dict[str, Tensor], near: float = 5e-6) -> None:
    """Equal losses and gradients, and no block that ran its own forward."""
    (loss, found), (expected, wanted) = gradients(fused, inputs), gradients(plain, inputs)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(found, wanted, near)
    blocks = [module for module in fused.modules() if isinstance(module, FusedBlock)]
    assert len(blocks) == 4 and not any(block.spec.said for block in blocks)


@pytest.mark.parametrize("padded", [True, False])
def test_windows_need_no_mask_and_padding_is_left_out(padded: bool, hows: list[How]) -> None:
    """A window of 4 reaches 4 tokens to both sides of the encoder, and to the token itself and 3 before it in
    the decoder."""
    fused, plain = pair()
    inputs = batch(NAME, length=11)
    if not padded:
        inputs["input_ids"].clamp_(min=3)
        inputs["attention_mask"].fill_(1)
    assert_alike(fused, plain, inputs)
    assert all(how.mask is None and how.softcap == 2.0 for how in hows)
    assert [how.window for how in hows] == [None, 5, None, None, 4, None] or [how.window for how in hows] == [
        5,
        None,
        4,
        None,
        None,
        None,
    ]
    of_encoder = hows[0].segments
    assert (of_encoder is not None) is padded


def test_tokens_of_padding_are_hidden_though_no_mask_is_given() -> None:
    """The encoder from itself, but not from the decoder, which reads all its places; the decoder from itself,
    in front of its tokens and between them."""
    fused, plain = pair()
    inputs = batch(NAME, length=9)
    del inputs["attention_mask"]
    assert_alike(fused, plain, inputs)
    inputs["input_ids"][0, 4] = inputs["input_ids"][1, 0] = PAD
    assert_alike(fused, plain, inputs)
    labels = inputs["labels"]
    given = labels.new_full(labels.shape, 5)
    given[0, :2] = given[1, 3] = PAD
    assert_alike(fused, plain, inputs | {"decoder_input_ids": given})
    labels[0, :2] = labels[1, 3] = -100  # no loss of what is hidden: it is left out
    assert_alike(fused, plain, inputs | {"decoder_input_ids": given})


def test_a_block_with_a_cache_by_position_is_not_run_twice_in_eval_mode() -> None:
    """A decoder of T5Gemma makes one there, and hands it on without its name; its own forward fills it."""
    torch.manual_seed(0)
    model = T5GemmaForConditionalGeneration(T5GemmaConfig(**T5GEMMA))
    fused = wrap(model, "lora", kernels="reference", memory="input", **SETTINGS["lora"]).eval()
    stir(fused, std=0.1)
    expected, wanted = gradients(pair()[1].eval(), batch(NAME))
    loss, found = gradients(fused, batch(NAME))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(found, wanted, 5e-6)


def test_positions_do_not_tell_samples_of_a_row_apart() -> None:
    fused, plain = pair()
    inputs = batch(NAME)
    rows, tokens = inputs["labels"].shape
    states = torch.randn(rows, tokens, 64, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([0, 1, 0, 1, 2, 3])[None].expand(rows, -1)
    assert_alike(fused, plain, inputs | {"decoder_inputs_embeds": states, "decoder_position_ids": positions})


@pytest.mark.parametrize("whole", [True, False])
def test_a_classifier_pools_a_token_that_the_mask_hides(whole: bool) -> None:
    """It takes the last that is no padding by its number: of the decoder or, without one, of the encoder."""
    fused, plain = pair(T5GemmaForSequenceClassification, is_encoder_decoder=whole, num_labels=3)
    ids = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    found, expected = (
        gradients(one, {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 2])})
        for one in (fused, plain)
    )
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    assert_same_gradients(found[1], expected[1], 5e-6)


def test_an_encoder_wider_than_its_decoder_is_fused_by_its_own_sizes() -> None:
    assert_alike(*pair(**dict(WIDER)), batch(NAME))


@pytest.mark.crossed(1)
@pytest.mark.parametrize("blocks", [None, MemoryConfig("attention")])
@pytest.mark.parametrize("backend", ["dp", "shard", "pp-1f1b"])
def test_an_encoder_wider_than_its_decoder_trains_where_no_list_cuts_both(
    backend: str, blocks: MemoryConfig | None
) -> None:
    one = case(NAME, "lora", BACKENDS[backend](NAME, 2), steps=1, blocks=blocks)
    check(replace(one, settings=(*one.settings, *WIDER)))


PLANS = [name for name in BACKENDS if name != "sp-ring"]
# adapters are in a pipeline in tests/parallel too, and the test above is of one
SHORT = (("sp-gather", "lora"), ("sp-ulysses", "full"), ("tp", "side"))


@pytest.mark.crossed(1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("backend", "method"), in_part(list(product(PLANS, SETTINGS)), list(SHORT)))
def test_fused_blocks_train_under_every_plan_as_in_one_process(
    backend: str, method: str, dropout: float
) -> None:
    plan = BACKENDS[backend](NAME, 2)
    check(case(NAME, method, plan, dropout=dropout, steps=1, blocks=MemoryConfig("attention")))


def test_a_window_to_both_sides_costs_twice_the_keys() -> None:
    one, both = (attention(64, 64, 8, 4, 16, causal, window=16).flop for causal in (True, False))
    assert both == 2 * one == 4 * 8 * 16 * 64 * (2 * 16 - 16 * 16 / 64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_our_kernels_train_as_its_own_modules_do() -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    sizes |= {"num_key_value_heads": 4, "query_pre_attn_scalar": 64, "sliding_window": 64}
    part = T5GEMMA["encoder"] | sizes | {"max_position_embeddings": 512}
    fused, plain = pair(ops="auto", device="cuda", encoder=part, decoder=part)
    inputs = {name: value.cuda() for name, value in batch(NAME, rows=4, length=300).items()}
    assert_alike(fused, plain, inputs, 2e-5)
