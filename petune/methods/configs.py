"""The methods: what each lets you set, and what it says of itself. Torch-free, so that a recipe is checked
without loading torch.

The range of a setting stands at its field (petune/setting.py); recipes and `wrap` read the same line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, Literal, cast

from petune.errors import Problem, UsageError, did_you_mean
from petune.setting import setting

# of a bottleneck: what transformers' ACT2FN names but for those with parameters, and AdapterHub's leakyrelu
ACTIVATIONS = (
    *("silu", "relu", "gelu", "tanh", "sigmoid", "leaky_relu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu"),
    *("gelu_10", "gelu_accurate", "gelu_fast", "gelu_python", "gelu_python_tanh", "hardswish", "laplace"),
    *("linear", "mish", "relu2", "relu6", "sqrtsoftplus", "swish", "leakyrelu"),
)
ADAPTERHUB = {"swish": "silu", "leakyrelu": "leaky_relu"}  # its words for two of them
ALSO_TRAIN = "modules trained whole beside the method; auto: the task head of the family"

# Usual rates are those of models WIDTH wide. LoRA's are published as 1e-4 to 2e-4 there, 4e-4 at 1,024 and
# 5e-4 at 768 (Hu et al. 2021), and as falling with width to the power of 0.78 in Llamas and 0.08 in Qwen
# (Thinking Machines' Tinker, 2025). MiniLM, 384 wide, learns at 5e-4 and falls apart at 1e-3. Full
# fine-tuning's, 1e-5 to 5e-5, are published alike from 384 to 8,192.
WIDTH, LR_POWER = 4096, 0.4

ROOM = 0.5  # of a GPU's free memory, which an activation cache may take where nobody says more or less


@dataclass(frozen=True)
class MethodConfig:
    """The settings of a method."""

    @property
    def reads_weights(self) -> bool:
        """Whether what trains is made of weights of the base, which have to be there before it is."""
        return False

    @property
    def filled(self) -> MethodConfig:
        """The settings by which a model is tuned whose tuned tensors are then read from a file."""
        return self


@dataclass(frozen=True)
class FullConfig(MethodConfig):
    """Full fine-tuning: every parameter trains."""


@dataclass(frozen=True)
class LoraConfig(MethodConfig):
    """LoRA (Hu et al. 2021, arXiv:2106.09685): y = Wx + b + s B A dropout(x), s = alpha / r, or with rslora
    alpha / sqrt(r)."""

    r: int = setting(16, "rank of the factors A [r, in] and B [out, r]", ge=1)
    alpha: float | None = setting(None, "scale numerator; default 2 r", gt=0)
    rslora: bool = setting(False, "the scale is alpha / sqrt(r) instead of alpha / r")
    dropout: float = setting(0.0, "dropout on the input of A", ge=0, lt=1)
    targets: str | tuple[str, ...] = setting(
        "auto",
        "auto, all-linear, a list of roles (q, k, v, o, gate, up, down, experts) or name suffixes,"
        " or one regex; q, k, v, gate, up of one linear that is several have factors of their own",
    )
    exclude: tuple[str, ...] = setting((), "roles or name suffixes to leave out")
    layers: tuple[int, ...] | None = setting(None, "numbers of the blocks to tune; null: all of them", ge=0)
    rank_pattern: Mapping[str, int] = field(
        default_factory=dict, hash=False, metadata={"ge": 1, "doc": "role or name suffix: an r of its own"}
    )
    alpha_pattern: Mapping[str, float] = field(
        default_factory=dict,
        hash=False,
        metadata={"gt": 0, "doc": "role or name suffix: an alpha of its own"},
    )
    bias: str = setting(
        "none",
        "biases of the base that train: none, all, or lora for those of tuned layers",
        choices=("none", "all", "lora"),
    )
    token_rows: tuple[int, ...] = setting((), "ids of tokens whose rows of the table train besides", ge=0)
    init: str = setting(
        "auto",
        "start of the factors; auto: B A = 0; pissa: the principal components of the weight",
        choices=("auto", "pissa"),
    )
    init_iterations: int | None = setting(
        None, "pissa: steps that approximate the components; null: the exact ones", ge=1
    )
    lr_ratio: float | None = setting(
        None, "LoRA+: learning rate of the factors B over that of all else; null: 1", gt=0
    )
    also_train: str | tuple[str, ...] = setting("auto", ALSO_TRAIN)

    @property
    def reads_weights(self) -> bool:
        return self.init == "pissa" or bool(self.token_rows) or self.bias != "none"

    @property
    def scale(self) -> float:
        """s, the factor of the update; rank-stabilised (Kalajdzievski 2023, arXiv:2312.03732) with rslora."""
        return (2 * self.r if self.alpha is None else self.alpha) / self.divisor

    @property
    def divisor(self) -> float:
        """What alpha is divided by."""
        return math.sqrt(self.r) if self.rslora else self.r


@dataclass(frozen=True)
class DoraConfig(LoraConfig):
    """DoRA (Liu et al. 2024, arXiv:2402.09353): y = (m / ||V||) V x + b, V = W + s B A, m a trained length of
    each row."""


@dataclass(frozen=True)
class Ia3Config(MethodConfig):
    """(IA)^3 (Liu et al. 2022, arXiv:2205.05638): learned scales, y = l * (W x + b), or W (l * x) + b."""

    targets: str | tuple[str, ...] = setting(("k", "v", "down"), "as for lora; by default the paper's")
    inputs: str | tuple[str, ...] = setting(
        ("down",), "the targets whose inputs are scaled instead of their outputs"
    )
    also_train: str | tuple[str, ...] = setting("auto", ALSO_TRAIN)


@dataclass(frozen=True)
class MissConfig(MethodConfig):
    """MiSS (Kang and Yin 2024, arXiv:2409.15371): y = Wx + b + D^T sum_k x_k, x_k being x's k-th r
    features."""

    r: int = setting(64, "rank: rows of D [r, out], the features of a shard", ge=1)
    dropout: float = setting(0.0, "dropout on the input of the sum", ge=0, lt=1)
    targets: str | tuple[str, ...] = setting("auto", "as for lora")
    exclude: tuple[str, ...] = setting((), "roles or name suffixes to leave out")
    also_train: str | tuple[str, ...] = setting("auto", ALSO_TRAIN)


@dataclass(frozen=True)
class AdapterConfig(MethodConfig):
    """Bottleneck adapters (Houlsby et al. 2019, arXiv:1902.00751): h + s up(act(down(h))) after every
    attention and MLP; kinds pfeiffer (Pfeiffer et al. 2020, arXiv:2005.00052) and parallel (He et al. 2022,
    arXiv:2110.04366) have one for each block."""

    kind: str = setting(
        "houlsby",
        "houlsby: after attention and MLP; pfeiffer: at the sum behind the MLP alone;"
        " parallel: beside the MLP alone",
        choices=("houlsby", "pfeiffer", "parallel"),
    )
    reduction: int = setting(16, "hidden width over bottleneck width", ge=1)
    activation: str = setting("silu", "non-linearity of the bottleneck", choices=ACTIVATIONS)
    dropout: float = setting(0.0, "dropout inside the bottleneck", ge=0, lt=1)
    scale: float | None = setting(None, "s, the factor of what it adds; null: 4 for parallel, else 1", gt=0)
    also_train: str | tuple[str, ...] = setting("auto", ALSO_TRAIN)

    @property
    def factor(self) -> float:
        """s; He et al. set 4 for adapters beside an MLP."""
        return self.scale if self.scale is not None else 4.0 if self.kind == "parallel" else 1.0


@dataclass(frozen=True)
class SideConfig(MethodConfig):
    """Ladder side-tuning (Sung et al. 2022, arXiv:2206.06522): a narrow network beside a backbone that needs
    no backward pass; with end: blend side-tuning (Zhang et al. 2020, arXiv:1912.13503)."""

    reduction: int = setting(8, "backbone width over side width", ge=1)
    layers: tuple[int, ...] | None = setting(
        None, "numbers of the blocks that have a side block; null: all of them", ge=0
    )
    end: str = setting(
        "residual",
        "residual: h + up(s), identity at init; paper: up(norm(s)); blend: alpha h + (1 - alpha)"
        " up(s), with s of the input alone",
        choices=("residual", "paper", "blend"),
    )
    alpha: float | None = setting(None, "blend: alpha, fixed; null: trained, from 1/2 on", gt=0, lt=1)
    start: str = setting(
        "random",
        "start of the side blocks; what is left of the backbone's, pruned: by the size of weights,"
        " fisher: by their Fisher information",
        choices=("random", "pruned", "fisher"),
    )
    fisher_rows: int | None = setting(
        None, "fisher: training rows that it is the mean of; null: 128, or all of fewer", ge=1
    )
    temperature: float = setting(0.1, "temperature of the sigmoid gates", gt=0)
    dropout: float = setting(0.0, "dropout on what enters the side network", ge=0, lt=1)
    also_train: str | tuple[str, ...] = setting("auto", ALSO_TRAIN)

    @property
    def reads_weights(self) -> bool:
        return self.start != "random"

    @property
    def climbs(self) -> bool:
        """Whether side blocks read what the blocks beside them give."""
        return self.end != "blend"

    def beside(self, depth: int) -> tuple[int, ...]:
        """The numbers of those of `depth` blocks that have a side block, in order."""
        return tuple(range(depth) if self.layers is None else sorted({*self.layers} & {*range(depth)}))

    @property
    def filled(self) -> SideConfig:
        return replace(self, start="random", fisher_rows=None)


@dataclass(frozen=True)
class HeadConfig(MethodConfig):
    """A head alone on a frozen model (Alain and Bengio 2016, arXiv:1610.01644): nothing before the end of the
    last block trains."""

    also_train: str | tuple[str, ...] = setting(
        "auto", "modules behind the last block, which train; auto: the task head of the family"
    )


# the files of a tuned folder: whose library reads them besides petune
FileLayout = Literal["peft", "transformers", "petune"]


@dataclass(frozen=True)
class Method:
    """A way of tuning, as the rest of petune sees it: what differs between methods is asked here, not by the
    method's name."""

    config: type[MethodConfig]
    module: str  # defines apply(model, family, config, also_train), which rewrites a model in place
    usual_lr: float  # of pretrained models that are WIDTH wide
    lr_power: float = LR_POWER  # of WIDTH / width, by which it grows
    files: FileLayout = "petune"
    needs_family: bool = False  # it finds its places by the family's table alone
    trains_base: bool = False  # every parameter trains, and nothing is left of the base
    # it ends in a plain model: what is tuned lies in the base's weights, or can be summed into them
    mergeable: bool = False
    row_cut: bool = True  # its layers can be cut by their inputs across ranks
    ladder: bool = False  # a network of its own climbs beside the blocks
    # its blocks give the same in every step, and have a forward pass alone
    still: bool = False

    def lr_at(self, width: int | None) -> float:
        """The usual learning rate of a model `width` wide, to two digits; None: WIDTH."""
        return float(f"{self.usual_lr * (WIDTH / (width or WIDTH)) ** self.lr_power:.1e}")

    @property
    def head_alone(self) -> bool:
        """Whether nothing trains but what stands behind the blocks."""
        return self.still and not self.ladder

    @property
    def apply(self) -> Callable[..., None]:
        """The function of its module, which loads torch."""
        return cast("Callable[..., None]", import_module(self.module).apply)


METHODS: dict[str, Method] = {
    "full": Method(
        FullConfig, "petune.methods.full", 2e-5, 0.0, "transformers", trains_base=True, mergeable=True
    ),
    "lora": Method(LoraConfig, "petune.methods.lora", 2e-4, files="peft", mergeable=True),
    "dora": Method(DoraConfig, "petune.methods.dora", 2e-4, files="peft", mergeable=True, row_cut=False),
    "ia3": Method(Ia3Config, "petune.methods.ia3", 3e-3, files="peft", mergeable=True),
    "miss": Method(MissConfig, "petune.methods.miss", 2e-5, files="peft", mergeable=True, row_cut=False),
    "adapter": Method(AdapterConfig, "petune.methods.adapter", 3e-4, needs_family=True),
    "side": Method(SideConfig, "petune.methods.side", 1e-3, needs_family=True, ladder=True, still=True),
    "head": Method(HeadConfig, "petune.methods.head", 1e-3, needs_family=True, mergeable=True, still=True),
}


def name_of(config: MethodConfig) -> str:
    """The name in METHODS of the method that `config` sets."""
    return next(name for name, method in METHODS.items() if method.config is type(config))


def method_of(config: MethodConfig) -> Method:
    """The method that `config` sets."""
    return METHODS[name_of(config)]


def make_config(method: str, settings: dict[str, Any]) -> MethodConfig:
    """The config of `method` with `settings`; lists become tuples.

    Raises UsageError for an unknown method or setting and for every value out of its range, all in one
    message.
    """
    if not isinstance(method, str) or method not in METHODS:
        near = (
            did_you_mean(method, METHODS) if isinstance(method, str) else "give its name, and settings apart"
        )
        raise UsageError(f"no method named {method!r}", expected=", ".join(METHODS), remedy=near)
    known = {entry.name: entry for entry in fields(METHODS[method].config)}
    problems = [
        Problem(
            f"{name} is not a setting of {method}",
            expected=", ".join(known) or "no settings",
            remedy=did_you_mean(name, known),
        )
        for name in settings
        if name not in known
    ]
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    for name, value in values.items():
        if name in known:
            kind, rules = str(known[name].type), known[name].metadata
            problems += [
                Problem(f"{method}.{name} = {value!r} {why}") for why in _violations(value, kind, rules)
            ]
    if problems:
        raise UsageError(problems)
    return cast("MethodConfig", cast("Any", METHODS[method].config)(**values))


def _violations(value: Any, kind: str, rules: Mapping[str, Any]) -> list[str]:
    """Why `value` cannot be a setting of a kind, as its annotation says it, and by its rules; empty when it
    can."""
    if value is None and "None" in kind:
        return []
    if kind == "bool":
        return [] if isinstance(value, bool) else ["is not true or false"]
    if kind.startswith("Mapping[str, "):
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            return ["is not a mapping of names to numbers"]
        inner = kind.removeprefix("Mapping[str, ").removesuffix("]")
        return [why for one in value.values() for why in _violations(one, inner, rules)][:1]
    if kind.startswith("tuple[int"):
        if not isinstance(value, tuple):
            return ["is not a list of whole numbers"]
        return [why for one in value for why in _violations(one, "int", rules)][:1]
    if isinstance(value, bool) or value is None:
        return ["is not a number" if "int" in kind or "float" in kind else "is not text"]
    number = isinstance(value, int) or (isinstance(value, float) and "float" in kind and math.isfinite(value))
    names = isinstance(value, tuple) and "tuple" in kind and all(isinstance(item, str) for item in value)
    text = (isinstance(value, str) and "str" in kind.split(" | ")) or names
    if ("int" in kind or "float" in kind) and not number:
        return ["is not a whole number" if "int" in kind else "is not a number"]
    if "str" in kind and not text:
        return ["is not a list of names" if "tuple" in kind else "is not text"]
    limits: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "ge": ("must be at least {}", lambda limit: bool(value >= limit)),
        "gt": ("must be above {}", lambda limit: bool(value > limit)),
        "le": ("must be at most {}", lambda limit: bool(value <= limit)),
        "lt": ("must be below {}", lambda limit: bool(value < limit)),
        "choices": ("is not one of {}", lambda limit: value in limit),
    }
    broken = [rule for rule, (_, holds) in limits.items() if rule in rules and not holds(rules[rule])]
    return [limits[rule][0].format(rules[rule]) for rule in broken]
