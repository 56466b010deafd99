"""LoRA by parts of a linear that is several: against peft on separate linears, merged, over a base in fewer
bytes, in files and back; what it does not go with."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import petune
from petune.errors import FileError, Stopped, UsageError
from petune.files.manifest import seal_folder
from petune.methods import tune, tuned_parameters, tuned_state, without_tuning
from petune.methods.configs import LoraConfig
from petune.methods.lora_parts import LoraParts
from petune.models.joined import joined_linears
from petune.models.tuned_linear import tuned_layers
from petune.saving.export import save_merged, write_peft
from tests.methods.peft_twins import read_by_peft
from tests.methods.zoo import ZOO, batch, of_64, stir, table, tiny
from tests.small_runs import SPECIAL, WORDS, run, settings, terminate_at, write_model

CLOSE = 1e-9
# by model: targets, some of them whole linears, and ranks of parts, of others 3
CASES: dict[str, tuple[list[str], dict[str, int]]] = {
    "phi3-causal": (["q", "v", "up", "down_proj"], {"v": 5}),
    "glm4-causal": (["gate", "up", "v_proj"], {"gate": 1}),
    "modernbert-classify": (["k", "gate"], {}),
    "gpt2-causal": (["q", "k", "v", "c_fc"], {"q": 2}),
}


class Separate(nn.Module):
    """The linears that one is, by role, each with its rows of the weight."""

    def __init__(self, module: nn.Module, lengths: dict[str, int]) -> None:
        super().__init__()
        turned = isinstance(module, Conv1D)
        weight, bias = cast("Tensor", module.weight), cast("Tensor | None", module.bias)
        rows = (weight.T if turned else weight).detach().split([*lengths.values()])
        biases = [None] * len(rows) if bias is None else bias.detach().split([*lengths.values()])
        for role, own, shift in zip(lengths, rows, biases, strict=True):
            linear = nn.Linear(own.shape[1], len(own), shift is not None, dtype=own.dtype)
            with torch.no_grad():
                linear.weight.copy_(own)
                if shift is not None:
                    linear.bias.copy_(shift)
            self.add_module(role, linear)

    def forward(self, x: Tensor) -> Tensor:
        """What the one gives."""
        return torch.cat([linear(x) for linear in self.children()], -1)


def apart(name: str) -> Any:
    """The model with separate linears, in float64."""
    model = tiny(name).double()
    for path, joined in joined_linears(model, table(name)).items():
        model.set_submodule(path, Separate(joined.module, dict(joined.lengths)))
    return model


def stirred(name: str, **settings: Any) -> Any:
    """The model tuned in float64, every factor moved away from its start."""
    model = petune.wrap(tiny(name).double(), **{"also_train": (), **settings})
    stir(model, std=0.1)
    return model


def key_in_peft(name: str) -> str:
    """Of a tuned tensor in the model with separate linears."""
    layer, _, own = name.rpartition(".")
    role, _, leaf = own.rpartition("lora_")
    return f"base_model.model.{layer}.{role.strip('_')}".rstrip(".") + f".lora_{leaf}.default.weight"


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps_are_those_of_peft_on_separate_linears(name: str) -> None:
    targets, ranks = CASES[name]
    ours = stirred(name, targets=targets, r=3, alpha=6, rank_pattern=ranks, dropout=0.25)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=targets, rank_pattern=ranks, lora_dropout=0.25, fan_in_fan_out=False
    )
    theirs = peft.get_peft_model(apart(name), config).double()
    own, twins = tuned_parameters(ours), dict(theirs.named_parameters())
    pairs = [(value, twins[key_in_peft(key)]) for key, value in own.items()]
    assert len(pairs) == sum(value.requires_grad for value in twins.values())
    with torch.no_grad():
        for value, twin in pairs:
            twin.copy_(value)
    inputs = batch(name)
    logits = ours.eval()(**inputs).logits
    torch.testing.assert_close(logits, theirs.eval()(**inputs).logits, rtol=CLOSE, atol=CLOSE)
    assert float((logits - tiny(name).double()(**inputs).logits).abs().max()) > 1e-2
    ours.train(), theirs.train()
    optimizers = [torch.optim.AdamW(side, lr=1e-2) for side in map(list, zip(*pairs, strict=True))]
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(step)  # parts draw dropout as linears would, one after the other
            optimizer.zero_grad()
            model(**inputs).loss.backward()
        for value, twin in pairs:
            torch.testing.assert_close(value.grad, twin.grad, rtol=CLOSE, atol=CLOSE)
        for optimizer in optimizers:
            optimizer.step()
    for value, twin in pairs:
        torch.testing.assert_close(value, twin, rtol=1e-6, atol=CLOSE)


def test_each_part_begins_as_lora_beside_a_linear_of_its_own() -> None:
    states = []
    for name in ("phi3-causal", "llama-causal"):
        model = tiny(name)
        torch.manual_seed(3)
        states.append(tuned_state(petune.wrap(model, "lora", r=3, targets=["q", "k", "v"])))
    found, alike = states
    assert len(found) == len(alike)
    for name, value in found.items():
        role = name.rpartition(".")[2][0]
        assert torch.equal(value, alike[name.replace(f"qkv_proj.{role}_", f"{role}_proj.")])


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_plain_lora_to_others_and_parts_to_petune(name: str, tmp_path: Path) -> None:
    targets, ranks = CASES[name]
    settings: dict[str, Any] = {"targets": targets, "r": 3, "alpha": 6, "rank_pattern": ranks}
    settings |= {"bias": "lora"} if name == "gpt2-causal" else {}
    ours, inputs = petune.wrap(tiny(name), **settings, also_train=()), batch(name)
    stir(ours, std=0.1)
    folder, expected = petune.save(ours, tmp_path / "ours"), ours(**inputs).logits
    theirs = read_by_peft(name, folder)
    torch.testing.assert_close(theirs.eval()(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
    again = petune.load(tiny(name), folder)
    state = tuned_state(ours)
    assert tuned_state(again).keys() == state.keys()
    for key, value in tuned_state(again).items():  # scales that differ are in B, and taken out again
        torch.testing.assert_close(value, state[key], rtol=1e-6, atol=0)
    assert sum(isinstance(layer, LoraParts) for _, layer in tuned_layers(again)) > 0
    assert petune.save(again, tmp_path / "again").is_dir()
    write_peft(ours, tmp_path / "peft")
    plain = petune.load(tiny(name), tmp_path / "peft")
    assert not any(isinstance(layer, LoraParts) for _, layer in tuned_layers(plain))
    torch.testing.assert_close(plain(**inputs).logits, expected, rtol=1e-5, atol=1e-5)


def test_factors_that_are_not_those_of_its_parts_are_refused(tmp_path: Path) -> None:
    ours = petune.wrap(tiny("phi3-causal"), "lora", r=3, targets=["q", "v"], also_train=())
    folder = petune.save(ours, tmp_path / "ours")
    record = json.loads((folder / "petune.json").read_text())
    record["config"]["rank_pattern"] = {"q": 2}
    (folder / "petune.json").write_text(json.dumps(record))
    seal_folder(folder)
    with pytest.raises(FileError, match="not those of the parts") as said:
        petune.load(tiny("phi3-causal"), folder)
    assert "q r=2, v r=3" in str(said.value)


@pytest.mark.parametrize("name", ["phi3-causal", "gpt2-causal"])
def test_merging_gives_the_same_logits_and_leaves_other_rows_alone(name: str, tmp_path: Path) -> None:
    ours, inputs = stirred(name, targets=["q", "v"], r=3), batch(name)
    base = tiny(name).double()
    before = ours(**inputs).logits
    save_merged(ours, tmp_path / "merged")
    assert torch.equal(ours(**inputs).logits, before)
    torch.testing.assert_close(petune.merge(ours)(**inputs).logits, before, rtol=1e-10, atol=1e-10)
    for path, joined in joined_linears(base, table(name)).items():
        lengths = [*joined.lengths.values()]
        changed = [
            bool((one != other).any())
            for one, other in zip(
                *(
                    (weight.T if isinstance(joined.module, Conv1D) else weight).split(lengths)
                    for weight in (ours.get_submodule(path).weight, joined.module.weight)
                ),
                strict=True,
            )
        ]
        if len(changed) == 3:
            assert changed == [True, False, True]


def test_a_copy_and_the_base_again_stand_alone() -> None:
    ours, inputs = stirred("phi3-causal", targets=["k", "gate"], r=3), batch("phi3-causal")
    twin, before = copy.deepcopy(ours), ours(**inputs).logits
    stir(ours)
    assert torch.equal(twin(**inputs).logits, before)
    with without_tuning(ours):
        assert torch.equal(ours(**inputs).logits, tiny("phi3-causal").double()(**inputs).logits)
    layer = next(layer for _, layer in tuned_layers(ours) if isinstance(layer, LoraParts))
    assert type(layer.plain()) is nn.Linear
    assert [*layer.plain().__dict__["_parameters"]] == ["weight", "bias"]
    assert "k r=3" in repr(layer)


@pytest.mark.parametrize("drops", [False, True], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("name", ["phi3-causal", pytest.param("gpt2-causal", marks=pytest.mark.long)])
def test_parts_keep_one_copy_of_their_input_but_with_dropout(name: str, kind: str, drops: bool) -> None:
    model = tiny(name).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    dropout = 0.25 if drops else 0.0
    petune.wrap(model, r=3, targets=["q", "k", "v"], dropout=dropout, kernels="off", also_train=())
    layer: Any = next(layer for _, layer in tuned_layers(model.train()) if isinstance(layer, LoraParts))
    tokens, inputs = 7, len(layer.factors("q")[0].T)
    x = torch.randn(tokens, inputs, dtype=layer.weight.dtype).requires_grad_()
    saved: dict[int, Tensor] = {}
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda value: saved.setdefault(value.data_ptr(), value), lambda value: value
        ),
        torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"),
    ):
        assert layer(x * 1).requires_grad  # a leaf would be rounded once under autocast
    # of the matrices with a row for each token, those that a product reads
    read = torch.bfloat16 if kind == "autocast" else torch.float32
    features = [value.shape[-1] for value in saved.values() if len(value) == tokens and value.dtype == read]
    made = [size for size in features if size < inputs]
    assert made == [3, 3, 3]
    if kind == "autocast" or not drops:  # else the masks of what drops out are in that dtype too
        assert sum(features) == inputs + layer.kept_features().inner
        assert len(features) - len(made) == (3 if drops else 1)


@pytest.mark.parametrize("base_dtype", ["int8", pytest.param("nf4", marks=pytest.mark.long)])
def test_a_base_in_fewer_bytes_has_the_same_update(base_dtype: Any) -> None:
    name, changes = "phi3-causal", of_64("phi3-causal")
    ours = petune.wrap(
        tiny(name, **changes), "lora", r=3, targets=["q", "gate"], base_dtype=base_dtype, also_train=()
    )
    stir(ours, std=0.1)
    layer: Any = ours.model.layers[0].self_attn.qkv_proj
    x = torch.randn(5, layer.in_features)
    torch.testing.assert_close(layer(x), x @ (layer.weight.form.dense() + layer.delta()).T)
    ours(**batch(name)).loss.backward()
    assert all(value.grad is not None for value in tuned_parameters(ours).values())
    before = ours(**batch(name)).logits
    torch.testing.assert_close(petune.merge(ours)(**batch(name)).logits, before, rtol=1e-5, atol=1e-5)


def test_settings_of_a_part_and_of_the_whole_find_their_parts() -> None:
    ours = tiny("phi3-causal")
    config = LoraConfig(
        targets=("q", "k", "v", "gate", "o"),
        exclude=("k",),
        rank_pattern={"q": 2, "qkv_proj": 5},
        alpha_pattern={"qkv": 7.0, "gate": 9.0},
        lr_ratio=4.0,
        layers=(1,),
    )
    tune(ours, config)
    found = {name: layer for name, layer in tuned_layers(ours) if isinstance(layer, LoraParts)}
    assert [name.rpartition(".")[2] for name in found] == ["qkv_proj", "gate_up_proj"]
    qkv, gate_up = found.values()
    assert {role: len(qkv.factors(role)[0]) for role in qkv.scales} == {"q": 2, "v": 5}
    assert qkv.scales == {"q": 3.5, "v": 1.4} and gate_up.scales == {"gate": 9 / 16}
    assert qkv.rates() == {"q_lora_B": 4.0, "v_lora_B": 4.0}


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "the whole too": ("lora", {"targets": ["qkv_proj", "q"]}, "names both this linear and q"),
    "a part of the whole left out": ("lora", {"exclude": ["k"]}, "other parts in `targets`: q, v"),
    "a rank of a part of the whole": ("lora", {"rank_pattern": {"q": 2}}, "'q' decides nothing"),
    "components": ("lora", {"targets": ["q"], "init": "pissa"}, "does not start from components"),
    "dora": ("dora", {"targets": ["q"]}, "this method tunes whole"),
    "ia3": ("ia3", {}, "this method tunes whole"),
    "miss": ("miss", {"targets": ["v"]}, "this method tunes whole"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_parts_do_not_go_with_is_refused(case: str) -> None:
    method, settings, words = WRONG[case]
    with pytest.raises(UsageError, match=words) as said:
        petune.wrap(tiny("phi3-causal"), method, **settings)
    assert "layers.0" in str(said.value) or case == "a rank of a part of the whole"


def test_several_adapters_are_not_by_parts_but_read_one_as_a_whole(tmp_path: Path) -> None:
    one = petune.add(tiny("phi3-causal"), "one", targets=["qkv"], also_train=())
    for model in (tiny("phi3-causal"), one):
        with pytest.raises(UsageError, match="do not share a Linear with LoRA by parts"):
            petune.add(model, "other", targets=["q"], also_train=())
    ours = petune.wrap(tiny("phi3-causal"), "lora", r=3, targets=["q", "v"], also_train=())
    stir(ours, std=0.1)
    with pytest.raises(UsageError, match="one tuning that has no name"):
        petune.add(ours, "other", targets=["o"], also_train=())
    folder, inputs = petune.save(ours, tmp_path / "ours"), batch("phi3-causal")
    several = petune.add(tiny("phi3-causal"), "one", folder=folder)
    torch.testing.assert_close(several(**inputs).logits, ours(**inputs).logits, rtol=1e-5, atol=1e-5)


def test_a_run_goes_on_from_its_checkpoint_and_leaves_parts(tmp_path: Path) -> None:
    place = write_model(tmp_path / "llama", "llama")
    model_type, config, values = ZOO["phi3-causal"]
    torch.manual_seed(0)
    model_type(config(**{**values, "vocab_size": len(SPECIAL) + len(WORDS)})).save_pretrained(place)
    method = {"name": "lora", "r": 2, "targets": ["q", "v", "gate"], "dropout": 0.1, "lr_ratio": 4}
    straight, stopped = (settings(tmp_path, method=method, max_steps=4, out=out) for out in ("one", "two"))
    run(straight)
    with pytest.raises(Stopped):
        run(stopped, terminate_at(2))
    run(stopped, resume=True)
    states = [
        tuned_state(petune.load(AutoModelForCausalLM.from_pretrained(place), recipe["out"]))
        for recipe in (straight, stopped)
    ]
    assert all("_lora_" in name for name in states[0])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
