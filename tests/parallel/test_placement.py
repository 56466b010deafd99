"""A model that is cut before it is read: on every rank of every plan the same, to the bit, as one that is
read whole and cut then; and no rank takes more memory than its part."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.load_memory import anonymous
from petune.errors import FileError, UsageError
from petune.methods import tune, tuned_parameters
from petune.methods.configs import make_config
from petune.models import family_of
from petune.models.contents import attach
from petune.models.fresh import draw_tuned
from petune.models.frozen_weight import FORMS, QuantisedWeight, dense_of
from petune.models.loading import AUTO, Head, load_model
from petune.models.source import resolve_model
from petune.parallel import ALONE, Mesh, ParallelPlan, alone, make_mesh, parallelize
from petune.parallel.configs import ROWS
from petune.parallel.fsdp import local, wholes
from petune.parallel.launch import process_group
from petune.parallel.mesh import coordinate
from petune.parallel.placement import ShardPlace
from petune.parallel.plan import Cut, Sharding, Stage
from petune.parallel.tensor.shard_params import Slice
from tests.methods.zoo import SETTINGS, of_64, tiny
from tests.parallel.plans import BACKENDS, COMPOSED, LOOPED, settings_of
from tests.pool import run

HEADS: dict[str, Head] = {"seq2seq": "seq2seq", "causal": "causal", "classify": "classify", "mlm": "mlm"}
METHODS: dict[str, dict[str, Any]] = {**SETTINGS, "dora": {"r": 4, "targets": ["q", "up"]}}
CPU = torch.device("cpu")


def written(folder: Path, name: str, **changes: Any) -> Head:
    tiny(name, **changes).bfloat16().save_pretrained(folder, max_shard_size="60KB")
    return HEADS[name.partition("-")[2]]


def unread(folder: Path, head: Head, method: str, dtype: torch.dtype) -> nn.Module:
    """The tuned model on the meta device with its contents."""
    labels = ["a", "b", "c"] if head == "classify" else None
    found = load_model(resolve_model(str(folder), folder), head, labels, dtype, seed=3)
    tune(found.model, make_config(method, METHODS[method]))
    assert found.contents is not None
    attach(found.model, found.contents)
    return found.model


def whole(folder: Path, head: Head, method: str, dtype: torch.dtype) -> nn.Module:
    """The same model, read by transformers and then tuned."""
    model = AUTO[head].from_pretrained(folder, dtype=dtype)
    tune(model, make_config(method, METHODS[method]))
    draw_tuned(model, 3)
    return model  # type: ignore[no-any-return]


def parts(
    model: nn.Module, plan: ParallelPlan, rank: int, base_dtype: str | None = None
) -> list[dict[str, Tensor]]:
    """What one rank holds of each of its stages. Nobody is there to talk to."""
    groups: Any = dict.fromkeys(("pp", "dp", "tp"), SimpleNamespace())
    mesh = Mesh(plan, rank, coordinate(plan, rank), CPU, groups)
    where = parallelize(model, family_of(model), plan, mesh, tuned_parameters, base_dtype=base_dtype)
    assert not any(value.is_meta for one in where.modules for value in (*one.parameters(), *one.buffers()))
    return [{**dict(one.named_buffers()), **one.state_dict()} for one in where.modules]


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine.keys() == other.keys()
        wrong = [name for name, value in other.items() if not torch.equal(mine[name], value)]
        assert not wrong
        assert all(mine[name].dtype == value.dtype for name, value in other.items())


# a backend of tests/parallel/plans.py -> its model and method: each of both occurs with several
CELLS: dict[str, tuple[str, str]] = {
    "tp": ("llama-causal", "lora"),
    "tp-whole-vocabulary": ("bart-seq2seq", "full"),
    "sp-gather": ("bert-mlm", "side"),
    "galaxy": ("t5-seq2seq", "adapter"),
    "galaxy2": ("gemma3-causal", "full"),
    "pp-1f1b": ("bart-seq2seq", "side"),
    "pp-gpipe": ("llama-causal", "dora"),
    "pp-interleaved": ("t5-seq2seq", "lora"),
    "tp x pp": ("t5-seq2seq", "full"),
    "galaxy x pp": ("bart-seq2seq", "lora"),
    "dp x tp": ("bert-mlm", "dora"),
}


def plan_of(backend: str, name: str) -> ParallelPlan:
    if backend in COMPOSED:
        return COMPOSED[backend](name)
    return {**BACKENDS, **LOOPED}[backend](name, 3 if backend in ("tp", "galaxy") else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            backend, marks=pytest.mark.long if backend in ("pp-gpipe", "tp x pp", "galaxy x pp") else ()
        )
        for backend in CELLS
    ],
)
def test_each_rank_reads_what_it_would_have_cut(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.parallel.placement.cross", lambda *_: None)
    name, method = CELLS[backend]
    plan = plan_of(backend, name)
    head = written(tmp_path, name, **dict(settings_of(name, plan)))
    dtype = torch.float32 if method == "full" else torch.bfloat16
    for rank in range(plan.world):
        found = parts(unread(tmp_path, head, method, dtype), plan, rank)
        assert_same(found, parts(whole(tmp_path, head, method, dtype), plan, rank))


@pytest.mark.parametrize("name", ["llama-causal", "t5-seq2seq", "bert-mlm"])
def test_a_single_process_reads_all_of_it(name: str, tmp_path: Path) -> None:
    head = written(tmp_path, name)
    for method in ("lora", "full"):
        found = parts(unread(tmp_path, head, method, torch.float32), ALONE, 0)
        assert_same(found, parts(whole(tmp_path, head, method, torch.float32), ALONE, 0))


@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_each_rank_reads_the_slice_of_the_quantised_whole(
    base_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.parallel.placement.cross", lambda *_: None)
    name = "llama-causal"
    plan = plan_of("tp-whole-vocabulary", name)
    assert plan.cut is not None
    cut = replace(plan.cut, heads=(4, 4), kv_heads=(2, 2), columns=(128, 64))
    plan = replace(plan, cut=cut)
    head = written(tmp_path, name, intermediate_size=192, head_dim=16)
    (alike,) = parts(unread(tmp_path, head, "lora", torch.bfloat16), ALONE, 0, base_dtype)
    both = [parts(unread(tmp_path, head, "lora", torch.bfloat16), plan, rank, base_dtype) for rank in (0, 1)]
    for rank, found in enumerate(both):
        assert_same(found, parts(whole(tmp_path, head, "lora", torch.bfloat16), plan, rank, base_dtype))
    cuts = {"q_proj": 0, "o_proj": 1, "up_proj": 0, "down_proj": 1}
    for path, dim in (
        (path, cuts.get(path.split(".")[-2])) for path in alike if path.endswith("proj.weight")
    ):
        if dim is None:
            continue
        slices = [held[0][path] for held in both]
        assert all(isinstance(value, QuantisedWeight) for value in slices)
        assert torch.equal(torch.cat([dense_of(value) for value in slices], dim), dense_of(alike[path]))


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.long)])
def test_each_rank_reads_its_rows_of_every_part_of_one_linear(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.parallel.placement.cross", lambda *_: None)
    name, plan = "phi3-causal", BACKENDS["tp"]("phi3-causal", 3)
    head = written(tmp_path, name)
    for rank in range(plan.world):
        found = parts(unread(tmp_path, head, method, torch.float32), plan, rank)
        assert_same(found, parts(whole(tmp_path, head, method, torch.float32), plan, rank))
        assert found[0]["model.layers.0.self_attn.qkv_proj.weight"].shape == ((64, 32, 32)[rank], 64)


@pytest.mark.parametrize(
    "base_dtype", ["nf4", *(pytest.param(one, marks=pytest.mark.long) for one in ("int8", "fp8"))]
)
def test_each_rank_reads_its_rows_of_every_part_of_a_quantised_linear(
    base_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.parallel.placement.cross", lambda *_: None)
    name = "phi3-causal"
    plan = BACKENDS["tp"](name, 2)
    assert plan.cut is not None
    plan = replace(plan, cut=replace(plan.cut, heads=(4, 4), kv_heads=(2, 2), columns=(64, 64)))
    changes = {**of_64(name), "hidden_size": 128}  # 512 scales, of which two scales of scales are
    head = written(tmp_path, name, **changes)
    (alike,) = parts(unread(tmp_path, head, "lora", torch.bfloat16), ALONE, 0, base_dtype)
    kind, calls = FORMS[base_dtype], list[Tensor]()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "of", lambda weight, of=kind.of: (calls.append(weight), of(weight))[1])
        both = [
            parts(unread(tmp_path, head, "lora", torch.bfloat16), plan, rank, base_dtype)[0]
            for rank in (0, 1)
        ]
    # two blocks of four linears, each of which a rank quantises once, however many parts of it it has
    assert sum(not weight.is_meta for weight in calls) == 2 * 2 * 4
    for rank, found in enumerate(both):
        assert_same([found], parts(whole(tmp_path, head, "lora", torch.bfloat16), plan, rank, base_dtype))
    path = "model.layers.1.self_attn.qkv_proj.weight"
    firsts = [(64 * at, 128 + 32 * at, 192 + 32 * at) for at in (0, 1)]
    rows = [[*range(q, q + 64), *range(k, k + 32), *range(v, v + 32)] for q, k, v in firsts]
    for found, own in zip(both, rows, strict=True):
        assert isinstance(found[path], QuantisedWeight)
        assert torch.equal(dense_of(found[path]), dense_of(alike[path])[own])


def test_boxes_of_a_shard_lie_where_its_rows_are_in_the_whole() -> None:
    """Rows 2 to 6 of what a rank has, 3 + 2 + 1 of the parts 8 + 4 + 4."""
    cut = Slice(0, (10, 6), pieces=((5, 3), (2, 2), (3, 1)))
    assert cut.spans(1) == [(5, 3), (10, 2), (15, 1)]
    part = torch.arange(4.0)[:, None]
    boxes = [(box[:, 0].tolist(), start) for box, start in ShardPlace([2, 0], 0, cut.spans(1)).boxes(part)]
    assert boxes == [([0.0], [7, 0]), ([1.0, 2.0], [10, 0]), ([3.0], [15, 0])]
    ranks = [torch.tensor([0, 1, 2, 3, 4, 8, 9, 12, 13, 14]), torch.tensor([5, 6, 7, 10, 11, 15])]
    assert torch.equal(cut.together(torch.cat(ranks)), torch.arange(16))


def test_a_share_that_cuts_a_block_of_weights_in_four_bits_is_refused(tmp_path: Path) -> None:
    head = written(tmp_path, "llama-causal", intermediate_size=128)
    plan = BACKENDS["tp"]("llama-causal", 2)
    with pytest.raises(UsageError, match=r"holds inputs in blocks(.|\n)*multiples of 64(.|\n)*int8"):
        parts(unread(tmp_path, head, "lora", torch.bfloat16), plan, 0, "nf4")


def test_a_value_that_is_not_finite_is_found_before_it_is_quantised(tmp_path: Path) -> None:
    model = tiny("llama-causal")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(FileError, match="up_proj"):
        parts(unread(tmp_path, "causal", "lora", torch.float32), ALONE, 0, "int8")


# ---------------------------------------------------------------- shards


def shards(folder: Path, head: Head, method: str, plan: ParallelPlan) -> bool:
    """Whether what this rank has read of a sharded model is, put together, the whole, before and after a
    forward pass; and ties stay."""
    expected = dict(whole(folder, head, method, torch.float32).named_parameters())
    model = unread(folder, head, method, torch.float32)
    where = parallelize(model, family_of(model), plan, make_mesh(plan, CPU), tuned_parameters)
    held = {name: local(value) for name, value in where.modules[0].named_parameters()}
    for turn in range(2):
        if turn:
            ids = torch.arange(3, 9)[None]
            with torch.no_grad():  # no backward pass will come, so shards are back behind it
                where.modules[0](input_ids=ids, **({"labels": ids} if head == "seq2seq" else {}))
        now = dict(where.modules[0].named_parameters())
        assert now.keys() == expected.keys()  # a tie counts once
        for name, value in zip(now, wholes(list(now.values())), strict=True):
            assert torch.equal(value, expected[name]), name
            assert local(now[name]).data_ptr() == held[name].data_ptr(), "its memory changed behind its back"
    return True


@pytest.mark.parametrize(
    ("name", "method", "sharding"),
    [
        ("t5-seq2seq", "full", Sharding(replicas=1, reshard=True, offload=False, frozen=True)),
        ("llama-causal", "lora", Sharding(replicas=1, reshard=True, offload=True, frozen=False)),
        ("bert-mlm", "dora", Sharding(replicas=1, reshard=False, offload=False, frozen=True)),
    ],
)
def test_each_rank_reads_its_shards(name: str, method: str, sharding: Sharding, tmp_path: Path) -> None:
    head = written(tmp_path, name)
    plan = replace(BACKENDS["shard"](name, 3), sharding=sharding)
    assert run(3, shards, tmp_path, head, method, plan) == [True] * 3


# ---------------------------------------------------------------- faults


def test_a_value_that_is_not_finite_on_one_rank_is_told_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama-causal")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1, 0] = float("nan")  # the last rank's
    model.save_pretrained(tmp_path)
    plan, told = BACKENDS["tp"]("llama-causal", 2), ['["model.layers.1.mlp.up_proj.weight"]', "[]"]
    monkeypatch.setattr("petune.parallel.placement.cross", lambda *_: None)
    monkeypatch.setattr(process_group, "inside", lambda: True)
    monkeypatch.setattr(process_group, "gather", lambda text: sorted({text, *told}))
    monkeypatch.setattr(process_group, "read_by_all", lambda: None)
    for rank in range(2):
        with pytest.raises(FileError, match=r"layers\.1\.mlp\.up_proj\.weight  holds a value that is not"):
            parts(unread(tmp_path, "causal", "lora", torch.float32), plan, rank)
    monkeypatch.setattr(process_group, "inside", lambda: False)
    parts(unread(tmp_path, "causal", "lora", torch.float32), plan, 0)  # which holds none of it


# ---------------------------------------------------------------- memory

MIB = 1 << 20


def large(folder: Path) -> int:
    """A model whose blocks are most of it, in bfloat16; its bytes in float32."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return 4 * sum(value.numel() for value in model.parameters())


def taken(make: Callable[[], Any]) -> int:
    """Bytes of its own that this process takes at the most while something is made."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free and kept would be taken again, unseen
    before, _ = anonymous()
    Path("/proc/self/clear_refs").write_text("5")
    kept = make()
    after = anonymous()[1] - before
    del kept
    return after


def read_part(folder: Path, plan: ParallelPlan, method: str, base_dtype: str | None = None) -> int:
    """What a rank takes to read its part, and what it holds then."""
    mesh = make_mesh(plan, CPU) if plan.world > 1 else alone(CPU)
    dist.barrier()

    def make() -> Any:
        model = unread(folder, "causal", method, torch.float32)
        return parallelize(model, family_of(model), plan, mesh, tuned_parameters, base_dtype=base_dtype)

    return taken(make)


EVEN = Cut(
    attention=ROWS["tp"].attention,
    mlp=ROWS["tp"].mlp,
    connection=ROWS["tp"].connection,
    exchange="gather",
    heads=(4, 4),
    kv_heads=(4, 4),
    columns=(1024, 1024),
    sequence=(),
    vocabulary=False,
    overlap=False,
)
HALVES = {
    "tp": ParallelPlan(tp=2, cut=EVEN),
    "pp": ParallelPlan(
        pp=2,
        stages=(Stage({"decoder": (0, 4)}), Stage({"decoder": (4, 8)})),
        schedule="1f1b",
        microbatches=2,
    ),
    "shard": replace(BACKENDS["shard"]("llama-causal", 2), sharding=Sharding(1, True, False, True)),
}


@pytest.fixture(scope="module")
def heavy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model of 129 MiB in float32, and its bytes."""
    folder = tmp_path_factory.mktemp("heavy")
    return folder, large(folder)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells what memory was taken")
@pytest.mark.parametrize("backend", HALVES)
def test_no_rank_takes_more_memory_than_its_part(backend: str, heavy: tuple[Path, int]) -> None:
    folder, size = heavy
    assert size > 120 * MIB
    for found in run(2, read_part, folder, HALVES[backend], "full"):
        assert found > 0.4 * size, "it was not measured"
        assert found < 1.1 * size / 2 + 24 * MIB, "half of it, a portion, and the modules"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells what memory was taken")
def test_a_model_that_is_quantised_as_it_is_read_is_never_there_dense(heavy: tuple[Path, int]) -> None:
    folder, size = heavy
    (found,) = run(1, read_part, folder, ALONE, "lora", "nf4")
    assert 0.12 * size < found < 0.8 * size, "4.13 of 32 bits, what a tensor takes meanwhile, the modules"
