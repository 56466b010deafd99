"""Operations find their group, shares sum to one, collectives that overlap count once, a trace is one a
browser can read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from petune.errors import UsageError
from petune.parallel import alone
from petune.profiling.attribution import OUTSIDE, Attribution
from petune.profiling.operations import REST, Traced, _communication, group_of, grouped, traced
from petune.profiling.repeat_step import Rehearsal
from petune.recipe import load_recipe
from petune.run.build import prepare
from tests.profiling.conftest import Rehearse
from tests.small_runs import settings


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::mm", "matrix products"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("c10d::allreduce_", "communication"),
        ("gloo:all_reduce", "communication"),
        ("autograd::engine::evaluate_function: MmBackward0", "autograd and dispatch"),
        ("SiluBackward0", "autograd and dispatch"),
        ("aten::silu_backward", "activations"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...FusedAdamMathFunctor...>",
            "optimizer and clipping",
        ),
        ("aten::native_layer_norm", "norms"),
        ("aten::_log_softmax", "softmax and loss"),
        ("aten::embedding", "embeddings and indexing"),
        ("Memcpy HtoD (Pageable -> Device)", "copies and casts"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", REST),
        ("aten::mul", REST),
    ],
)
def test_an_operation_finds_its_group(name: str, group: str) -> None:
    assert group_of(name) == group


def event(name: str, start: float, end: float, device: str = "CPU") -> SimpleNamespace:
    return SimpleNamespace(
        name=name, time_range=SimpleNamespace(start=start, end=end), device_type=SimpleNamespace(name=device)
    )


def test_collectives_that_overlap_count_once() -> None:
    events = [
        event("gloo:all_reduce", 0, 4e6),
        event("c10d::allreduce_", 1e6, 2e6),
        event("gloo:send", 3e6, 5e6),
        event("c10d::barrier", 7e6, 8e6),
        event("aten::mm", 0, 9e6),
        event("ncclDevKernel_AllReduce", 20e6, 21e6, "CUDA"),
    ]
    assert _communication(events, cuda=False) == pytest.approx(6)
    assert _communication(events, cuda=True) == pytest.approx(1)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Traced, Path]:
    """One step that was traced, and the file of its trace, for all tests that ask."""
    folder = tmp_path_factory.mktemp("traced")
    recipe = load_recipe(settings(folder, accumulate=1))
    rehearsal, file = Rehearsal(prepare(recipe), alone(torch.device("cpu"))), folder / "deep" / "trace.json"
    return traced(rehearsal, Attribution(rehearsal.runner.modules), file), file


def test_one_process_communicates_nothing_and_shares_sum_to_one(seen: tuple[Traced, Path]) -> None:
    found, _ = seen
    assert found.communication == 0
    assert sum(one.share for one in found.operations) == pytest.approx(1)
    assert sum(one.share for one in grouped(found.operations)) == pytest.approx(1)
    assert [one.seconds for one in found.operations] == sorted(
        (one.seconds for one in found.operations), reverse=True
    )
    assert "aten::mm" in {one.name for one in found.operations}
    assert not [one for one in found.operations if one.name.startswith("petune: ")]


def test_backward_time_is_of_the_modules_that_have_a_backward_pass(seen: tuple[Traced, Path]) -> None:
    found = seen[0].backward
    for path in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "lm_head", OUTSIDE):
        assert found[path] > 0
    assert "model.embed_tokens" not in found


def test_a_trace_names_the_phases(seen: tuple[Traced, Path]) -> None:
    names = {one.get("name") for one in json.loads(seen[1].read_text())["traceEvents"]}
    assert {"petune: batches", "petune: forward and backward", "petune: update", "aten::mm"} <= names


def test_a_trace_that_cannot_be_written_is_a_wrong_word(rehearse: Rehearse, tmp_path: Path) -> None:
    rehearsal = rehearse(accumulate=1)
    with pytest.raises(UsageError, match="--trace"):
        traced(rehearsal, Attribution(rehearsal.runner.modules), tmp_path)
