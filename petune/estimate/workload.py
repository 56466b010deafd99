"""What a step computes: the operations of every block as it is tuned, cut into regions that ranks share.

Read off the model on the meta device, so a frozen weight has no gradient of its own, a block below the lowest
tuned one no backward pass, a ladder its levels and a backbone without one, a decoder's block its attention to
the encoder, and the last stage its head and loss. How long a part takes is in petune.estimate.part_seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

from torch import nn

from petune.estimate.footprint import first_trained
from petune.estimate.forecast import Sketch
from petune.models.experts import sizes_of, weights_of
from petune.models.gated_delta import keys_of
from petune.models.sites import ends_of
from petune.models.spec import (
    Attention,
    Family,
    LinearAttention,
    RoutedMlp,
    Shape,
    StackName,
    StackRule,
    child_of,
)
from petune.models.stack import Stack, own_stacks
from petune.parallel.fsdp import weighed
from petune.parallel.plan import foldable
from petune.parallel.tensor.own_tokens import still_outside

Place = Literal["attention", "scores", "mlp", "experts", "connection", "ladder", "embedding", "head"]


@dataclass(frozen=True)
class MatmulWork:
    """A matrix that tokens are multiplied by, or as many as there are `experts`. narrow: low-rank factors and
    bottlenecks; across: it reads the encoder's tokens."""

    inner: int
    columns: int
    trained: bool
    narrow: bool = False
    across: bool = False
    experts: int = 1

    @property
    def numbers(self) -> int:
        """How many it has."""
        return self.experts * self.inner * self.columns


@dataclass(frozen=True)
class WorkPart:
    """What ranks share by one rule. tokens: of a row; keys: those that attention sees. returned: whether the
    backward pass comes here. heads: of attention, with those of keys and their width; columns: of an
    activation; norms: over `width` features, stepwise: RMS norms by torch, one operation after the other;
    vocabulary: of a loss; rows: of a table that is looked up;
    copies: of each token, one for every expert that it goes through. folds: see `foldable`; samples: of a row
    that lies behind the others, in segments, where there are several, 0 where none does. own_tokens: a head
    whose loss ranks with tokens of their own make of these."""

    place: Place
    tokens: int
    width: int
    itemsize: int
    products: tuple[MatmulWork, ...] = ()
    keys: int = 0
    heads: tuple[int, int, int] | None = None
    causal: bool = False
    folds: bool = False
    samples: int = 0
    columns: int = 0
    gated: bool = False
    norms: int = 0
    stepwise: bool = False
    vocabulary: int = 0
    table: int = 0
    returned: bool = True
    forward: bool = True
    copies: int = 1
    own_tokens: bool = False

    @property
    def weights(self) -> int:
        """Numbers of its matrices."""
        return sum(one.numbers for one in self.products)

    @property
    def tuned(self) -> int:
        """Numbers that train."""
        return self.table + sum(one.numbers for one in self.products if one.trained)


RegionWork = tuple[WorkPart, ...]  # after which the ranks that share it meet
Block = tuple[RegionWork, ...]


@dataclass(frozen=True)
class Workload:
    """A forward and a backward pass of all replicas: blocks in the order of the stages, each by its stack and
    its number among `kinds`, and what stands before the first and behind the last of them. overlaps: what
    ranks say goes on while blocks compute; weighed: see petune.parallel.fsdp."""

    family: Family
    shape: Shape
    kinds: tuple[Block, ...]
    blocks: tuple[tuple[StackName, int], ...]
    embedding: RegionWork
    head: RegionWork
    rows: int
    tokens: tuple[tuple[StackName, int], ...]
    itemsize: int
    accumulate: int
    overlaps: bool
    weighed: tuple[int, int]

    @cached_property
    def lowest(self) -> int:
        """The first block to which gradients go back; as many as there are for none."""
        back = (index for index, (_, kind) in enumerate(self.blocks) if any(map(_returns, self.kinds[kind])))
        return next(back, len(self.blocks))

    @cached_property
    def tuned(self) -> int:
        """Numbers that train, of all parts."""
        return sum(part.tuned * times for part, times in self.parts(0, len(self.blocks)).items())

    @cached_property
    def frozen(self) -> int:
        """Numbers of matrices beside these."""
        parts = self.parts(0, len(self.blocks)).items()
        return sum((part.weights - part.tuned) * times for part, times in parts)

    @cached_property
    def depth(self) -> dict[StackName, int]:
        """Blocks of each stack."""
        return dict(Counter(stack for stack, _ in self.blocks))

    def parts(self, start: int, end: int) -> Counter[WorkPart]:
        """What a rank of blocks [start, end) computes, with how many there are of each."""
        if (start, end) not in self._parts:
            ends = (self.embedding if start == 0 else ()) + (self.head if end == len(self.blocks) else ())
            self._parts[start, end] = self.of_blocks(start, end) + Counter(ends)
        return self._parts[start, end]

    @cached_property
    def _parts(self) -> dict[tuple[int, int], Counter[WorkPart]]:
        return {}

    def of_blocks(self, start: int, end: int) -> Counter[WorkPart]:
        """`parts` without what stands before the first block and behind the last."""
        found: Counter[WorkPart] = Counter()
        for kind, times in Counter(kind for _, kind in self.blocks[start:end]).items():
            for part in (part for region in self.kinds[kind] for part in region):
                found[part] += times
        return found


def _fuses(drawn: Sketch) -> bool:
    """Whether a run fuses head and blocks: on a CPU only by reference kernels."""
    return drawn.recipe.kernels == "reference" or (drawn.recipe.kernels != "off" and drawn.device == "cuda")


def _samples(drawn: Sketch) -> int:
    """See WorkPart.samples, of a decoder's blocks, fused ones: a packed row has two at least; several rows
    are of unequal length, unless they are windows."""
    data = drawn.recipe.data
    return 0 if data.chunk or not _fuses(drawn) else 2 if data.packing else 1


def _returns(region: RegionWork) -> bool:
    return any(part.returned and part.place != "ladder" for part in region)


# ---------------------------------------------------------------- read off a model


def workload(drawn: Sketch) -> Workload:
    """What a step of a sketched recipe computes; its model has to be of a family with a table."""
    family, work = cast("Family", drawn.family), drawn.work
    shape, first = family.shape(drawn.config), first_trained(drawn.model, family)
    kinds: dict[Block, int] = {}
    blocks, within = list[tuple[StackName, int]](), set[int]()
    for order, stack in enumerate(own_stacks(drawn.model, family).values()):
        within |= {id(module) for module in stack.modules()}
        for index, block in stack.numbered:
            reader = _Reader(drawn, stack, shape, first is not None and (order, index) >= first)
            kind = tuple(reader.block(block, index))
            blocks.append((stack.name, kinds.setdefault(kind, len(kinds))))
    tokens = tuple(work.tokens.items())
    last = tokens[-1][1] if work.vocabulary_head else 1
    outside = [one for one in drawn.model.modules() if isinstance(one, nn.Linear) and id(one) not in within]
    head = WorkPart(
        "head",
        last,
        shape.width,
        work.itemsize,
        tuple(item for one in outside for item in _products(one)),
        vocabulary=max((one.out_features for one in outside), default=0),
        own_tokens=work.vocabulary_head and _fuses(drawn) and still_outside(drawn.model),
    )
    tables = cast("Any", drawn.model).get_input_embeddings().parameters()
    trained = sum(value.numel() for value in tables if value.requires_grad)
    table = WorkPart("embedding", sum(dict(tokens).values()), shape.width, work.itemsize, table=trained)
    return Workload(
        family,
        shape,
        tuple(kinds),
        tuple(blocks),
        (replace(table, returned=bool(trained)),),
        (head,),
        work.rows,
        tokens,
        work.itemsize,
        drawn.recipe.accumulate,
        drawn.device == "cuda",
        weighed(drawn.model),
    )


@dataclass(frozen=True)
class _Reader:
    """Reads blocks of one stack. returned: whether gradients go back through them."""

    drawn: Sketch
    stack: Stack
    shape: Shape
    returned: bool

    def block(self, block: nn.Module, index: int) -> Iterator[RegionWork]:
        work, recipe = self.drawn.work, self.drawn.recipe
        shape, tokens = self.shape, work.tokens[self.stack.name]
        runs = not recipe.cache
        plain = WorkPart(
            "connection", tokens, shape.width, work.itemsize, returned=self.returned, forward=runs
        )
        sizes = (shape.heads, shape.kv_heads, shape.head_dim)
        yield from self._regions(block, self.stack.rule, plain, sizes, shape.columns)
        ladder = cast("Any", self.stack._modules.get("side"))
        if ladder is not None and ladder.has(index):
            yield self._level(ladder, index, tokens)

    def _regions(
        self, block: nn.Module, rule: StackRule, plain: WorkPart, sizes: tuple[int, int, int], columns: int
    ) -> Iterator[RegionWork]:
        """Attention, MLP, and what lies between them."""
        inside: set[int] = set()
        norms, kinds = 0, set[str]()
        for sublayer in rule.sublayers_in(block):
            core, region = sublayer.core, sublayer.core.region
            norms += 1
            around = (sublayer.norm_in, sublayer.norm_out, sublayer.norm_after_sum)
            kinds |= {one.kind for one in around if one is not None}
            if isinstance(core, RoutedMlp):
                yield self._mixture(block, core, plain, inside)
                continue
            keys = self.drawn.work.tokens.get("encoder", 0) if region.cross else plain.tokens
            products: list[MatmulWork] = []
            gated = False
            for role, path in region.sites.items():
                if (found := child_of(block, path)) is not None:
                    across = region.cross and role in ("k", "v")
                    products += [replace(one, across=across) for one in _products(found[1])]
                    inside.update(map(id, found[1].modules()))
                    gated |= role == "gate"
            kind: Place = "connection" if region.kind == "mixer" else region.kind  # which is whole too
            part = replace(plain, place=kind, products=tuple(products), keys=keys)
            if isinstance(core, LinearAttention):
                mixer = cast("Any", block.get_submodule(core.at))
                states = mixer.num_v_heads, mixer.num_v_heads, mixer.head_v_dim
                yield part, replace(plain, keys=keys_of(mixer.head_k_dim), heads=states)
            elif isinstance(core, Attention):
                causal = core.causal and not region.cross
                out = cast("tuple[str, nn.Module]", child_of(block, region.leave))[1]
                own = *sizes[:2], ends_of(out)[0] // sizes[0]  # heads of other blocks may have another width
                scores = replace(plain, place="scores", keys=keys, heads=own)
                folds = foldable(rule)
                yield part, replace(scores, causal=causal, folds=folds, samples=_samples(self.drawn) * folds)
            else:
                own = columns * getattr(self.shape, region.columns) // self.shape.columns
                yield (replace(part, columns=own, gated=gated),)
        others = [
            one for one in block.modules() if isinstance(one, nn.Linear) and id(one) not in inside
        ]  # bottlenecks
        products = [replace(item, narrow=True) for one in others for item in _products(one)]
        stepwise = self.drawn.device == "cpu" and "rms" in kinds  # torch has layer norms in one operation
        yield (replace(plain, products=tuple(products), norms=norms, stepwise=stepwise),)

    def _mixture(self, block: nn.Module, core: RoutedMlp, plain: WorkPart, inside: set[int]) -> RegionWork:
        """Experts, the shared one, and the router beside both, whose modules are put `inside`."""
        router, module = cast("Any", block.get_submodule(core.router)), block.get_submodule(core.experts)
        products = tuple(_of_experts(module))
        experts = replace(plain, place="experts", products=products, copies=int(router.top_k), gated=True)
        beside = [router] if core.gate is None else [router, block.get_submodule(core.gate)]
        found = [
            replace(experts, columns=self.shape.columns),
            replace(plain, products=tuple(item for one in beside for item in _products(one))),
        ]
        linears = []
        if core.shared is not None:
            linears = [block.get_submodule(path) for path in core.shared.region.sites.values()]
            own = tuple(item for one in linears for item in _products(one))
            found.append(replace(plain, place="mlp", products=own, columns=self.shape.shared, gated=True))
        inside.update(id(one) for read in (module, *beside, *linears) for one in read.modules())
        return tuple(found)

    def _level(self, ladder: Any, index: int, tokens: int) -> RegionWork:
        """A level of a ladder: its narrow block, and the way down to it. All ranks compute it in full, or on
        tokens of their own."""
        rule, block, down = self.stack.rule, ladder.blocks[index], ladder.down[0]
        sizes = (self.shape.heads, self.shape.kv_heads, max(1, down.out_features // self.shape.heads))
        columns = max(1, self.shape.columns * down.out_features // down.in_features)
        plain = WorkPart("ladder", tokens, down.out_features, 4)
        parts = [part for region in self._regions(block, rule, plain, sizes, columns) for part in region]
        way = replace(plain, products=tuple(_products(ladder.down[index + 1])))
        return tuple(replace(part, place="ladder") for part in (*parts, way))


def _products(layer: nn.Module) -> Iterator[MatmulWork]:
    """The matrices of a linear and of what tunes it."""
    for name, value in layer.named_parameters():
        if value.dim() == 2:
            yield MatmulWork(value.shape[1], value.shape[0], value.requires_grad, narrow=name != "weight")


def _of_experts(module: nn.Module) -> Iterator[MatmulWork]:
    """The matrices of all experts and of what tunes them."""
    for weight in weights_of(module):
        experts, outputs, inputs = sizes_of(module, weight)
        value = module.get_parameter(weight)
        yield MatmulWork(inputs, outputs, value.requires_grad, experts=experts)
    for name, value in module.named_parameters():
        if value.dim() == 3 and name not in weights_of(module):
            yield MatmulWork(value.shape[2], value.shape[1], value.requires_grad, True, experts=len(value))
