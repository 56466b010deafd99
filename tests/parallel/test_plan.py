"""Plans: shares that add up for any sizes, and every plan that cannot be refused with its key, all reasons at
once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from petune.errors import UsageError
from petune.models import FAMILIES
from petune.parallel.configs import ROWS, CutConfig, DpConfig, ParallelConfig, PpConfig
from petune.parallel.plan import (
    ALONE,
    Cut,
    ParallelPlan,
    Sharding,
    Stage,
    apportion,
    describe,
    grain,
    in_grains,
    slow_columns,
)
from petune.parallel.planning import balanced, head_in_blocks, make_plan, suggested_list
from tests.methods.zoo import ZOO


def config_of(name: str, **changes: Any) -> Any:
    """The config of a model of the zoo."""
    _, config, values = ZOO[name]
    return config(**{**values, **changes})


def plan(
    parallel: ParallelConfig,
    name: str = "llama-causal",
    world: int | None = None,
    rows: int = 8,
    **changes: Any,
) -> ParallelPlan:
    """The plan for a model of the zoo: 8 heads in 4 groups for llama, 96 columns, 2 blocks per stack."""
    config = config_of(name, **changes)
    return make_plan(parallel, FAMILIES[config.model_type], config, world, rows)


def faults(parallel: ParallelConfig, *args: Any, **settings_: Any) -> dict[str, str]:
    """Why the plan cannot be: key -> what, expected, found and remedy in one text."""
    with pytest.raises(UsageError) as caught:
        plan(parallel, *args, **settings_)
    assert caught.value.code == 2
    return {problem.where or "": str(problem) for problem in caught.value.problems}


def cut_of(parallel: ParallelConfig, *args: Any, **settings_: Any) -> Cut:
    found = plan(parallel, *args, **settings_).cut
    assert found is not None
    return found


# ------------------------------------------------------------------ sizes


def test_no_axis_is_one_process() -> None:
    assert plan(ParallelConfig()) == ALONE
    assert plan(ParallelConfig(), world=1) == ALONE


def test_an_open_size_is_two_on_a_cpu_and_all_devices_otherwise() -> None:
    config = config_of("bert-classify")
    sizes = [
        make_plan(ParallelConfig(dp=DpConfig()), FAMILIES["bert"], config, None, 8, available).dp
        for available in (2, 1, 8)
    ]
    assert sizes == [2, 2, 8]


def test_an_open_size_takes_what_the_others_leave() -> None:
    assert plan(ParallelConfig(dp=DpConfig(), tp=CutConfig(size=2)), world=8).dp == 4
    assert plan(ParallelConfig(dp=DpConfig(), tp=CutConfig(), pp=PpConfig()), world=8) == dataclasses.replace(
        plan(ParallelConfig(dp=DpConfig(size=2), tp=CutConfig(size=2), pp=PpConfig(size=2))),
    )
    assert plan(ParallelConfig(tp=CutConfig()), world=1).world == 1


def test_a_list_says_how_many_ranks() -> None:
    assert (
        plan(
            ParallelConfig(
                dp=DpConfig(shares=(3, 1)), tp=CutConfig(heads=(4, 2, 2)), pp=PpConfig(stages=(1, 1))
            )
        ).world
        == 12
    )


@pytest.mark.parametrize("world", [1, 3, 8])
def test_sizes_must_multiply_to_the_processes_that_exist(world: int) -> None:
    found = faults(ParallelConfig(dp=DpConfig(size=2), tp=CutConfig(size=2)), world=world)
    assert f"expected 4 (dp 2 x tp 2), found {world} processes" in found["parallel"]


def test_processes_without_an_axis_are_refused() -> None:
    assert "parallel=dp" in faults(ParallelConfig(), world=2)["parallel"]


def test_blocks_are_cut_along_one_axis() -> None:
    assert set(
        faults(ParallelConfig(tp=CutConfig(), sp=CutConfig(), cut=CutConfig(2, "heads", "heads", "whole")))
    ) == {
        "parallel.sp",
        "parallel.cut",
    }


# ------------------------------------------------------------------ shares


@pytest.mark.parametrize("row", ROWS)
def test_a_plain_size_is_cut_evenly(row: str) -> None:
    cut = cut_of(ParallelConfig(**{row: CutConfig(size=2)}))
    layouts = ROWS[row]
    assert (cut.attention, cut.mlp, cut.connection) == (layouts.attention, layouts.mlp, layouts.connection)
    assert cut.heads == ((4, 4) if layouts.attention == "heads" else ())
    assert cut.kv_heads == ((2, 2) if layouts.attention == "heads" else ())
    assert cut.columns == ((48, 48) if layouts.mlp == "heads" else ())
    assert cut.sequence == ((1, 1) if layouts.connection == "sequence" else ())


def test_shares_are_one_ratio_for_heads_columns_and_tokens() -> None:
    cut = cut_of(ParallelConfig(galaxy=CutConfig(shares=(3, 1))))
    assert (cut.heads, cut.kv_heads, cut.columns, cut.sequence) == ((6, 2), (3, 1), (72, 24), (3, 1))


def test_every_list_can_be_given() -> None:
    cut = cut_of(
        ParallelConfig(galaxy=CutConfig(heads=(6, 2), columns=(60, 36), sequence=(11, 5))), "bert-classify"
    )
    assert (cut.heads, cut.kv_heads, cut.columns, cut.sequence) == ((6, 2), (6, 2), (60, 36), (11, 5))


def test_cut_takes_any_legal_layouts() -> None:
    cut = cut_of(
        ParallelConfig(
            cut=CutConfig(size=2, attention="sequence", mlp="heads", connection="sequence", exchange="ring")
        )
    )
    assert (cut.heads, cut.columns, cut.sequence, cut.exchange) == ((), (48, 48), (1, 1), "ring")


@pytest.mark.parametrize(
    ("lists", "ratio"),
    [
        ({"shares": (3, 1)}, (3, 1)),
        ({"heads": (6, 2), "columns": (60, 36)}, (60, 36)),
        ({"heads": (6, 2), "sequence": (2, 1)}, (6, 2)),
        ({"size": 2}, (1, 1)),
    ],
)
def test_the_vocabulary_is_cut_as_the_other_work_is(lists: dict[str, Any], ratio: tuple[int, int]) -> None:
    name = "galaxy2" if "sequence" in lists else "tp"
    config = ParallelConfig(**{name: CutConfig(**lists, vocabulary=True)})
    assert cut_of(config, "llama-causal").vocabulary == ratio


def test_the_vocabulary_is_cut_for_tp_where_there_is_a_head_over_it() -> None:
    tp, galaxy = ParallelConfig(tp=CutConfig()), ParallelConfig(galaxy=CutConfig())
    assert [cut_of(one, "llama-causal").vocabulary for one in (tp, galaxy)] == [(1, 1), ()]
    assert not cut_of(tp, "bert-classify").vocabulary
    assert not cut_of(ParallelConfig(tp=CutConfig(vocabulary=False))).vocabulary
    assert cut_of(ParallelConfig(galaxy=CutConfig(vocabulary=True))).vocabulary
    config = config_of("llama-causal")
    found = make_plan(tp, FAMILIES["llama"], config, None, 8, vocabulary_head=False).cut
    assert found is not None and not found.vocabulary
    with pytest.raises(UsageError, match=r"parallel\.tp\.vocabulary .*this task's output"):
        make_plan(
            ParallelConfig(tp=CutConfig(vocabulary=True)),
            FAMILIES["llama"],
            config,
            None,
            8,
            vocabulary_head=False,
        )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_lists_of_any_plan_add_up_to_the_model(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 6))
    groups, group = data.draw(st.integers(ranks, 12)), data.draw(st.integers(1, 4))
    columns, layers = data.draw(st.integers(ranks, 500)), data.draw(st.integers(ranks, 30))
    shares = (
        tuple(data.draw(st.lists(st.integers(1, 9), min_size=ranks, max_size=ranks)))
        if data.draw(st.booleans())
        else ()
    )
    heads = groups * group
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": columns,
        "num_hidden_layers": layers,
    }
    galaxy = cut_of(
        ParallelConfig(galaxy=CutConfig(size=ranks, shares=shares)), hidden_size=8 * heads, **sizes
    )
    assert (sum(galaxy.heads), sum(galaxy.kv_heads), sum(galaxy.columns)) == (heads, groups, columns)
    assert all(
        query == group * keys and keys >= 1 for query, keys in zip(galaxy.heads, galaxy.kv_heads, strict=True)
    )
    assert all(count >= 1 for count in galaxy.columns)
    piped = plan(ParallelConfig(pp=PpConfig(size=ranks)), hidden_size=8 * heads, **sizes)
    numbers = [number for stage in piped.stages for number in range(*stage.blocks["decoder"])]
    assert numbers == list(range(layers))
    rows = data.draw(st.integers(ranks, 64))
    replicas = plan(ParallelConfig(dp=DpConfig(size=ranks, shares=shares)), rows=rows)
    assert sum(apportion(rows, replicas.shares)) == rows and min(apportion(rows, replicas.shares)) >= 1


# ------------------------------------------------------------------ what cannot be cut


def test_heads_must_add_up() -> None:
    found = faults(ParallelConfig(tp=CutConfig(heads=(4, 2))))["parallel.tp.heads"]
    assert "expected 8, found [4, 2]: 6" in found and "for example [6, 2]" in found


def test_no_example_is_given_where_none_would_be_accepted() -> None:
    found = faults(ParallelConfig(tp=CutConfig(heads=(2, 2, 2, 1, 2))))
    assert (
        "expected 8, found [2, 2, 2, 1, 2]: 9" in found["parallel.tp.heads"]
        and "for example" not in found["parallel.tp.heads"]
    )
    assert "at most 4 ranks" in found["parallel.tp.size"]


def test_heads_stay_in_their_groups() -> None:
    found = faults(ParallelConfig(tp=CutConfig(heads=(5, 3))))["parallel.tp.heads"]
    assert "expected multiples of 2, found [5, 3]" in found
    assert cut_of(ParallelConfig(tp=CutConfig(heads=(5, 3))), "bert-classify").heads == (5, 3)


def test_columns_must_add_up() -> None:
    assert (
        "expected 96, found [40, 40]: 80"
        in faults(ParallelConfig(galaxy=CutConfig(columns=(40, 40))))["parallel.galaxy.columns"]
    )


@pytest.mark.parametrize("key", ["shares", "heads", "columns", "sequence"])
def test_a_list_has_an_entry_for_every_rank(key: str) -> None:
    settings = CutConfig(size=2, **{key: (1, 1, 1)})
    assert f"parallel.galaxy.{key}" in faults(ParallelConfig(galaxy=settings))


def test_more_ranks_than_groups_or_columns_are_refused() -> None:
    assert (
        "at most 4 ranks, found 8 ranks for 8 heads in 4 groups"
        in faults(ParallelConfig(tp=CutConfig(size=8)))["parallel.tp.size"]
    )
    found = faults(ParallelConfig(cut=CutConfig(4, "sequence", "heads", "sequence")), intermediate_size=3)
    assert "at most 3 ranks" in found["parallel.cut.size"]


def test_ulysses_needs_a_key_and_value_head_for_each_rank() -> None:
    assert (
        "found 8" in faults(ParallelConfig(sp=CutConfig(size=8, exchange="ulysses")))["parallel.sp.exchange"]
    )
    assert cut_of(ParallelConfig(sp=CutConfig(size=8, exchange="gather"))).exchange == "gather"


@pytest.mark.parametrize(
    ("row", "settings_", "keys"),
    [
        (
            "tp",
            {"attention": "sequence", "connection": "sequence", "mlp": "heads"},
            {"attention", "connection"},
        ),
        ("cut", {"attention": "heads", "mlp": "sequence", "connection": "whole"}, {"connection"}),
        ("galaxy", {"shares": (3, 1), "heads": (6, 2)}, {"shares"}),
        (
            "sp",
            {"heads": (4, 4), "columns": (48, 48), "overlap": True, "exchange": "ring"},
            {"heads", "columns", "overlap"},
        ),
        ("galaxy2", {"columns": (48, 48), "exchange": "ulysses"}, {"columns", "exchange"}),
        ("tp", {"sequence": (1, 1), "exchange": "ring"}, {"sequence", "exchange"}),
    ],
)
def test_settings_that_contradict_one_another_are_refused_with_the_rest(
    row: str, settings_: dict[str, Any], keys: set[str]
) -> None:
    found = faults(ParallelConfig(dp=DpConfig(size=99), **{row: CutConfig(**settings_)}))
    assert set(found) == {"parallel.dp", *(f"parallel.{row}.{key}" for key in keys)}
    assert all(text.count("parallel.") < 3 for text in found.values()), (
        "a key is named once, and perhaps in a remedy"
    )


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("bert-classify", "attention_probs_dropout_prob"),
        ("bart-seq2seq", "attention_dropout"),
        ("t5-seq2seq", "dropout_rate"),
        ("gpt2-causal", "attn_pdrop"),
    ],
)
def test_a_ring_does_not_drop_probabilities(name: str, rate: str) -> None:
    ring = ParallelConfig(sp=CutConfig(exchange="ring"))
    assert "expected dropout 0, found 0.1" in faults(ring, name, **{rate: 0.1})["parallel.sp.exchange"]
    config = config_of(name, **{rate: 0.1})
    # a head alone trains
    assert make_plan(ring, FAMILIES[config.model_type], config, None, 8, still=True).cut is not None
    assert cut_of(ring, name).exchange == "ring"
    assert cut_of(ParallelConfig(sp=CutConfig()), name, **{rate: 0.1}).exchange == "gather"


def test_cut_must_say_its_layouts() -> None:
    assert set(faults(ParallelConfig(cut=CutConfig(mlp="heads")))) == {"parallel.cut"}


@pytest.mark.parametrize("change", [{"decoder_attention_heads": 4}, {"decoder_ffn_dim": 48}])
def test_stacks_of_different_sizes_are_not_cut_by_one_list(change: dict[str, int]) -> None:
    assert (
        "differ in" in faults(ParallelConfig(galaxy=CutConfig()), "bart-seq2seq", **change)["parallel.galaxy"]
    )
    assert cut_of(ParallelConfig(sp=CutConfig()), "bart-seq2seq", **change).attention == "sequence"


def test_a_vocabulary_smaller_than_the_ranks_is_not_cut() -> None:
    assert (
        "1 entries for 2"
        in faults(ParallelConfig(tp=CutConfig(vocabulary=True)), vocab_size=1)["parallel.tp.vocabulary"]
    )


# ------------------------------------------------------------------ pipelines


def test_blocks_are_split_evenly_encoder_before_decoder() -> None:
    assert plan(ParallelConfig(pp=PpConfig(size=3)), "t5-seq2seq").stages == (
        Stage({"encoder": (0, 2)}),
        Stage({"decoder": (0, 1)}),
        Stage({"decoder": (1, 2)}),
    )
    assert plan(ParallelConfig(pp=PpConfig(stages=(1, 2, 1))), "bart-seq2seq").stages[1] == Stage(
        {"encoder": (1, 2), "decoder": (0, 1)}
    )


def test_a_t5_config_counts_its_decoder_by_itself() -> None:
    assert dict(FAMILIES["t5"].depth(config_of("t5-seq2seq", num_decoder_layers=5))) == {
        "encoder": 2,
        "decoder": 5,
    }


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_these_schedules_have_two_stages_per_rank(schedule: str) -> None:
    found = plan(ParallelConfig(pp=PpConfig(size=2, schedule=schedule)), num_hidden_layers=6)
    assert [stage.blocks["decoder"] for stage in found.stages] == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert found.microbatches == 4
    listed = plan(ParallelConfig(pp=PpConfig(stages=(2, 1, 2, 1), schedule=schedule)), num_hidden_layers=6)
    assert (listed.pp, len(listed.stages)) == (2, 4)


def test_stages_must_add_up_and_be_one_per_rank() -> None:
    found = faults(ParallelConfig(pp=PpConfig(stages=(2, 1))))["parallel.pp.stages"]
    assert "expected 2 (2 decoder), found [2, 1]: 3" in found and "for example [1, 1]" in found
    assert set(faults(ParallelConfig(pp=PpConfig(size=3, stages=(1, 1))))) == {"parallel.pp.stages"}


@pytest.mark.parametrize("size", [2, None])
@pytest.mark.parametrize("stages", [(2, 1, 1), (2, 2)])
def test_interleaved_stages_are_a_multiple_of_the_ranks(size: int | None, stages: tuple[int, ...]) -> None:
    found = faults(
        ParallelConfig(pp=PpConfig(size=size, stages=stages, schedule="interleaved")), num_hidden_layers=4
    )
    assert "a multiple of" in found["parallel.pp.stages"]


def test_more_stages_than_blocks_are_refused() -> None:
    assert "at most 2 stages" in faults(ParallelConfig(pp=PpConfig(size=3)))["parallel.pp.size"]
    assert (
        "found 4 stages on 2 ranks"
        in faults(ParallelConfig(pp=PpConfig(size=2, schedule="zero-bubble")))["parallel.pp.size"]
    )


def test_every_micro_batch_has_a_row_of_the_smallest_replica() -> None:
    config = ParallelConfig(dp=DpConfig(shares=(3, 1)), pp=PpConfig(size=2, microbatches=4))
    assert "at most 2, the rows of a replica, found 4" in faults(config, rows=8)["parallel.pp.microbatches"]
    assert plan(config, rows=16).microbatches == 4
    assert "at most 1" in faults(ParallelConfig(pp=PpConfig(size=2)), rows=1)["parallel.pp.microbatches"]
    assert plan(ParallelConfig(pp=PpConfig(size=2, schedule="gpipe")), rows=1).microbatches == 1


def test_1f1b_needs_as_many_micro_batches_as_stages() -> None:
    assert (
        "at least 2"
        in faults(ParallelConfig(pp=PpConfig(size=2, microbatches=1)))["parallel.pp.microbatches"]
    )
    assert plan(ParallelConfig(pp=PpConfig(size=2, microbatches=1, schedule="gpipe"))).microbatches == 1


def test_interleaved_goes_in_equal_rounds() -> None:
    config = ParallelConfig(pp=PpConfig(size=2, microbatches=5, schedule="interleaved"))
    assert "a multiple of 2, found 5" in faults(config, num_hidden_layers=4)["parallel.pp.microbatches"]
    assert (
        plan(
            ParallelConfig(pp=PpConfig(size=2, schedule="interleaved", stages=(1,) * 6)),
            num_hidden_layers=6,
            rows=5,
        ).microbatches
        == 4
    )


# ------------------------------------------------------------------ replicas, and what nobody supports


def test_every_replica_has_a_row() -> None:
    assert "at most 2, found 4" in faults(ParallelConfig(dp=DpConfig(size=4)), rows=2)["parallel.dp"]


def test_shares_of_replicas_are_one_each() -> None:
    assert "parallel.dp.shares" in faults(ParallelConfig(dp=DpConfig(size=3, shares=(3, 1))))


def test_sharding_is_taken_over() -> None:
    config = DpConfig(size=4, shard=True, replicas=2, reshard=False, offload="cpu", frozen="replicated")
    assert plan(ParallelConfig(dp=config)).sharding == Sharding(2, False, True, False)


def test_settings_of_sharding_need_sharding() -> None:
    found = faults(
        ParallelConfig(dp=DpConfig(size=2, replicas=2, reshard=False, offload="cpu", frozen="replicated"))
    )
    assert set(found) == {f"parallel.dp.{name}" for name in ("replicas", "reshard", "offload", "frozen")}


def test_whole_copies_divide_the_replicas() -> None:
    for replicas in (3, 4):
        assert set(faults(ParallelConfig(dp=DpConfig(size=4, shard=True, replicas=replicas)))) == {
            "parallel.dp.replicas"
        }
        found = faults(ParallelConfig(dp=DpConfig(shard=True, replicas=replicas)), world=4)
        assert f"one of 1, 2, found {replicas}" in found["parallel.dp.replicas"]
    assert (
        "nothing to shard over"
        in faults(ParallelConfig(dp=DpConfig(size=1, shard=True)))["parallel.dp.shard"]
    )


def test_a_model_without_a_table_has_replicas_only() -> None:
    config = config_of("llama-causal")
    config.model_type = "mamba"
    assert make_plan(ParallelConfig(dp=DpConfig(size=2)), None, config, None, 8).dp == 2
    with pytest.raises(UsageError) as caught:
        make_plan(
            ParallelConfig(dp=DpConfig(shard=True), tp=CutConfig(), pp=PpConfig()), None, config, None, 8
        )
    assert [problem.where for problem in caught.value.problems] == [
        "parallel.tp",
        "parallel.pp",
        "parallel.dp.shard",
    ]


@pytest.mark.parametrize("config", [ParallelConfig(sp=CutConfig()), ParallelConfig(pp=PpConfig(size=2))])
def test_blocks_may_differ_from_one_another_but_not_be_dropped(config: ParallelConfig) -> None:
    mixed = {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    assert plan(config, "qwen2-causal", **mixed).cut or plan(config, "qwen2-causal", **mixed).pp == 2
    assert "decoder_layerdrop 0.1" in faults(config, "bart-seq2seq", decoder_layerdrop=0.1)["model"]
    assert plan(ParallelConfig(dp=DpConfig()), "qwen2-causal", **mixed).dp == 2


def test_gradients_of_weights_that_fsdp_has_freed_are_not_put_off() -> None:
    asked = ParallelConfig(dp=DpConfig(size=2, shard=True), pp=PpConfig(size=2, schedule="zero-bubble"))
    assert "when FSDP has freed them" in faults(asked, num_hidden_layers=4)["parallel.pp.schedule"]


def test_all_reasons_come_at_once() -> None:
    config = ParallelConfig(
        dp=DpConfig(size=2, shares=(1, 1, 1), frozen="replicated"),
        galaxy=CutConfig(size=2, heads=(5, 3), columns=(1, 1), exchange="ring"),
        pp=PpConfig(stages=(5, 5), microbatches=64),
    )
    assert set(faults(config, world=4)) == {
        "parallel",
        "parallel.dp.shares",
        "parallel.dp.frozen",
        "parallel.galaxy.heads",
        "parallel.galaxy.columns",
        "parallel.galaxy.exchange",
        "parallel.pp.stages",
        "parallel.pp.microbatches",
    }


# ------------------------------------------------------------------ in words


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ParallelConfig(), "one process"),
        (ParallelConfig(dp=DpConfig(size=2)), "dp 2"),
        (ParallelConfig(dp=DpConfig(shares=(3, 1))), "dp 2 (rows 3:1)"),
        (
            ParallelConfig(
                dp=DpConfig(size=4, shard=True, replicas=2, reshard=False, offload="cpu", frozen="replicated")
            ),
            "dp 4 (sharded in 2 whole copies; frozen replicated; kept gathered; shards on the CPU)",
        ),
        (ParallelConfig(tp=CutConfig(size=2)), "tp 2 (heads 4,4; columns 48,48; vocabulary cut)"),
        (
            ParallelConfig(tp=CutConfig(shares=(3, 1))),
            "tp 2 (heads 6,2; columns 72,24; vocabulary 3:1)",
        ),
        (ParallelConfig(sp=CutConfig(size=2, exchange="ring")), "sp 2 (sequence 1:1; ring)"),
        (
            ParallelConfig(galaxy2=CutConfig(shares=(3, 1), overlap=True)),
            "galaxy2 2 (heads 6,2; sequence 3:1; overlapped)",
        ),
        (
            ParallelConfig(cut=CutConfig(2, "sequence", "heads", "sequence")),
            "cut 2 (attention sequence, mlp heads, connection sequence; columns 48,48; sequence 1:1; gather)",
        ),
        (
            ParallelConfig(
                dp=DpConfig(size=2),
                galaxy=CutConfig(heads=(6, 2), columns=(60, 36), sequence=(11, 5)),
                pp=PpConfig(stages=(3, 1), microbatches=4),
            ),
            (
                "dp 2 x galaxy 2 (heads 6,2; columns 60,36; sequence 11:5) x pp 2 (stages 3,1; 1f1b, 4"
                " micro-batches)"
            ),
        ),
    ],
)
def test_a_plan_is_one_line(config: ParallelConfig, text: str) -> None:
    assert describe(plan(config, num_hidden_layers=4)) == text


def test_an_offered_list_gives_every_rank_something() -> None:
    assert suggested_list(6, (1, 3, 2)) == "for example [1, 3, 2]"
    assert suggested_list(2, (6, 6), unit=3) == "for example [3, 3]"
    assert suggested_list(6, (1,) * 8) == "give a list of at most 6"


# ------------------------------------------------------------------ stages and the head


@pytest.mark.parametrize(
    ("total", "number", "head", "expected"),
    [
        (32, 2, 2.4, (17, 15)),
        (32, 4, 2.4, (9, 9, 8, 6)),
        (32, 8, 2.4, (5, 5, 4, 4, 4, 4, 4, 2)),
        (7, 3, 0.0, (3, 2, 2)),
        (4, 4, 3.0, (1, 1, 1, 1)),
        (5, 1, 1.0, (5,)),
    ],
)
def test_the_last_stage_has_fewer_blocks_by_as_many_as_the_head_is_like(
    total: int, number: int, head: float, expected: tuple[int, ...]
) -> None:
    assert balanced(total, number, head) == expected


@given(total=st.integers(1, 100), number=st.integers(1, 16), head=st.floats(0, 20))
def test_stages_share_out_all_blocks_and_each_has_one(total: int, number: int, head: float) -> None:
    number = min(number, total)
    found = balanced(total, number, head)
    assert sum(found) == total and len(found) == number and min(found) >= 1
    assert list(found[:-1]) == sorted(found[:-1], reverse=True)
    even = apportion(total, (1,) * number)
    assert max([*found[:-1], found[-1] + head]) <= max([*even[:-1], even[-1] + head]) + 1e-9


@given(
    total=st.integers(1, 300_000),
    parts=st.lists(st.integers(1, 40), min_size=1, max_size=16),
    least=st.sampled_from((1, 8)),
)
def test_columns_are_cut_where_tensor_cores_are_fast(total: int, parts: list[int], least: int) -> None:
    total = max(total - total % least, least * len(parts))
    found, unit = in_grains(total, parts, least), grain(total, len(parts), least)
    even = len(set(parts)) == 1 and total % (8 * len(parts)) == 0
    assert sum(found) == total and (even or min(found) >= unit or total // unit < len(parts))
    assert not any(size % (8 if even else unit) for size in found[:-1]) and not found[-1] % least
    assert not even or len(set(found)) == 1
    exact = [total * part / sum(parts) for part in parts]
    assert max(abs(one - other) for one, other in zip(found, exact, strict=True)) < 2 * unit


def test_columns_and_vocabulary_of_a_model_are_cut_in_128s() -> None:
    assert in_grains(14336, (3, 1)) == (10752, 3584) and in_grains(14336, (2, 1)) == (9600, 4736)
    assert in_grains(128256, (2, 1)) == (85504, 42752), "what is not a multiple is left to the last"
    assert in_grains(30522, (1, 1)) == (15232, 15290), "of an odd vocabulary too"
    assert in_grains(11008, (1,) * 8) == (1376,) * 8, "equal ones stay equal"
    assert in_grains(96, (1, 1)) == (48, 48) and in_grains(37, (2, 1)) == (25, 12), (
        "small ones nearly exactly"
    )


@pytest.mark.parametrize(
    ("columns", "near"),
    [
        ([10344, 3992], [10368, 3968]),
        ([10240, 4096], None),
        ([7168, 7168], None),
        ([2752, 2753], None),  # of a model whose number is odd, and the last has what is left
        ([60, 36], None),  # of a small one
    ],
)
def test_a_list_of_columns_that_slows_tensor_cores_down_is_told_of(
    columns: list[int], near: list[int] | None
) -> None:
    sizes = {"intermediate_size": sum(columns)}
    found = slow_columns(cut_of(ParallelConfig(tp=CutConfig(size=2, columns=tuple(columns))), **sizes))
    assert found is None if near is None else found is not None and found.endswith(f"as {near}")


def test_a_head_is_as_many_blocks_as_its_weights_are() -> None:
    config = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    model = LlamaConfig(
        **config, num_key_value_heads=8, head_dim=128, num_hidden_layers=32, vocab_size=128256
    )
    assert head_in_blocks(FAMILIES["llama"], model) == pytest.approx(128256 / (2 * 40 * 128 + 3 * 14336))
    axis = ParallelConfig(pp=PpConfig(size=2, microbatches=4))
    for head, blocks in ((True, [17, 15]), (False, [16, 16])):
        plan = make_plan(axis, FAMILIES["llama"], model, 2, 4, vocabulary_head=head)
        assert [end - start for one in plan.stages for start, end in one.blocks.values()] == blocks
