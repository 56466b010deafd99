"""The frozen weight of a base: the tensor itself where it is dense, else a `QuantisedWeight`, the one copy of
it in a form of fewer bytes.

A quantised weight is a parameter under the same name and with the shape, dtype and device of the weight that
it stands for, so layers hold and call it as any other: `torch.nn.functional.linear` and `x @ weight` multiply
in its form, forward and backward; copies, moves, slices and one of several experts keep the form; `copy_`
quantises what is written; everything else reads its values, which `dense_of` gives, and a view is a copy of
them. It does not train.

How FSDP2 shards such a weight by rows is in petune.parallel.sharded_weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from petune.errors import UsageError
from petune.models.expert_form import EXPERT_FORMS, ExpertForm
from petune.models.form import Form, of_bytes
from petune.models.fp8 import Fp8
from petune.models.int8 import Int8
from petune.models.nf4 import Nf4

FORMS: Mapping[str, type[Form]] = {one.name: one for one in (Fp8, Int8, Nf4)}  # as `base_dtype` names them
POINTS = 4  # values of a tensor that tell it from another


class QuantisedWeight(Tensor):
    """A frozen weight [n, k], or of experts [E, n, k], as a tensor: `form` holds it, and there is no other
    copy. samples: float64, the `sampled` values of the dense weight it was made of, by which that is known
    again; None of a slice."""

    form: Form
    part: bool
    _sampled: list[Tensor | None]  # one, shared by all that share the memory

    @staticmethod
    @torch.inference_mode(False)  # torch counts versions of what it slices
    def __new__(cls, form: Form, samples: Tensor | None = None, *, part: bool = False) -> Self:
        """Of a form, whose memory it shares. part: of some rows or columns of another weight."""
        made = Tensor._make_wrapper_subclass(cls, form.shape, dtype=form.dtype, device=form.tensors[0].device)
        made.form, made.part, made._sampled = form, part, [samples]
        return made

    @property
    def samples(self) -> Tensor | None:
        """See the class."""
        return self._sampled[0]

    @samples.setter
    def samples(self, value: Tensor | None) -> None:
        self._sampled[0] = value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Products go to the form, and a parameter that is given other data takes its form; the rest as torch
        does it."""
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        if func in _MATMULS and not isinstance(args[0], cls) and _is_plain(args[1]):
            return _times(*args)
        if func is Tensor.__setitem__ and isinstance(args[0], cls):
            raise _cannot_write(args[0], "an index")
        if func == _SET_DATA and isinstance(args[0], cls) and not isinstance(args[1], cls):
            raise _cannot_write(args[0], "dense data in its place")
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func == _SET_DATA:
            args[0].form, args[0]._sampled = args[1].form, args[1]._sampled
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's has wider types
        """What keeps the form (see _KEEP), else the same of dense values. Raises UsageError for what would
        write into those."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], cls) and (keep := _KEEP.get(func)) is not None:
            made = keep(*args, **kwargs)
            if made is not NotImplemented:
                return made
        arguments = func._schema.arguments
        given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
        for value in (given.get(one.name) for one in arguments if one.is_write):
            for found in value if isinstance(value, list | tuple) else (value,):
                if isinstance(found, cls):
                    raise _cannot_write(found, str(func))
        counts = func.is_view and torch.is_inference_mode_enabled()  # torch counts versions of views
        with torch.inference_mode(False) if counts else nullcontext():
            args, kwargs = tree_map_only(cls, dense_of, (args, kwargs))
            return func(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raises UsageError where it is to train."""
        if requires_grad:
            raise _cannot_train(self)
        return self

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # a method of Tensor's, to a type checker
        """Bytes that it takes."""
        return self.form.nbytes

    def data_ptr(self) -> int:
        """Where its first tensor lies."""
        return self.form.tensors[0].data_ptr()

    def storage(self) -> Any:
        """Raises UsageError: files of plain tensors, which ask for it, cannot hold this one."""
        what = f"a weight in {self.form.name} is no plain tensor, as safetensors writes"
        remedy = "save what trains: petune.save; or all: torch.save (accelerate: safe_serialization=False)"
        raise UsageError(what, remedy=remedy)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # Tensor's has no keywords
        sizes = " x ".join(map(str, self.shape))
        return f"QuantisedWeight({self.form.name}, {sizes}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantisedWeight:
        if id(self) not in memo:
            form = self.form.each(lambda value: copy.deepcopy(value, memo))
            memo[id(self)] = _remade(form, self.samples, isinstance(self, nn.Parameter), self.part)
        return cast("QuantisedWeight", memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _remade, (self.form, self.samples, isinstance(self, nn.Parameter), self.part)

    @torch.no_grad()
    def hold(self, whole: Form, start: Sequence[int], samples: Tensor) -> None:
        """Hold the box of this shape that begins at `start` of a weight in this form, in the memory that is
        here; `samples` are those of its dense values."""
        form = whole
        for dim, (first, length) in enumerate(zip(start, self.shape, strict=True)):
            form = form.narrow(dim, first, length)
        self.form.take(form)
        self.part = whole.shape != self.shape
        self.samples = None if self.part else samples

    @torch.no_grad()
    def hold_experts(self, each: Iterable[Tensor], count: int) -> None:
        """Quantise the dense weights [n, k] of its experts, one by one: those here, of `count`."""
        assert isinstance(self.form, ExpertForm)
        self.part = count != len(self)
        places, found = sample_places(count * self.shape[1:].numel()), list[Tensor]()
        for number, dense in enumerate(each):
            self.form.expert(number).write(dense)
            own = [at - number * dense.numel() for at in places if at // dense.numel() == number]
            found.append(dense.reshape(-1)[own].double())
        self.samples = None if self.part else torch.cat(found)


def _remade(form: Form, samples: Tensor | None, parameter: bool, part: bool) -> Tensor:
    made = QuantisedWeight(form, samples, part=part)
    return nn.Parameter(made, requires_grad=False) if parameter else made


# what torch.load may call, which takes no other function from a file
torch.serialization.add_safe_globals([_remade, of_bytes, *FORMS.values(), *EXPERT_FORMS.values()])


def _cannot_write(weight: QuantisedWeight, by: str) -> UsageError:
    what = f"a weight in {weight.form.name} cannot be written by {by}"
    return UsageError(what, remedy="write the whole weight with copy_")


def _cannot_train(weight: QuantisedWeight) -> UsageError:
    what = f"a weight in {weight.form.name} cannot train"
    return UsageError(what, where="base_dtype", remedy="leave base_dtype out, or do not train it")


# ------------------------------------------------------------------ what keeps the form


def _shared(weight: QuantisedWeight) -> QuantisedWeight:
    made = QuantisedWeight(weight.form, part=weight.part)
    made._sampled = weight._sampled  # what is written by one name is known by the other
    return made


def _cloned(weight: QuantisedWeight, memory_format: Any = None) -> QuantisedWeight:
    form = weight.form.each(lambda value: value.clone(memory_format=torch.contiguous_format))
    return QuantisedWeight(form, weight.samples, part=weight.part)


def _like(weight: QuantisedWeight, *, device: Any = None, **_: Any) -> QuantisedWeight:
    """In memory that holds nothing."""
    return QuantisedWeight(
        weight.form.each(lambda value: torch.empty_like(value, device=device)), part=weight.part
    )


def _moved(
    weight: QuantisedWeight,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **_: Any,
) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    form = weight.form.each(
        lambda value: value.to(device=device or value.device, non_blocking=non_blocking, copy=True)
    )
    samples = weight.samples
    if dtype is not None:
        form, samples = form.to(dtype), None if samples is None else samples.to(dtype).to(samples.dtype)
    return QuantisedWeight(form, samples, part=weight.part)


def _sliced(
    weight: QuantisedWeight, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(weight.shape[dim])
    whole = last - first == weight.shape[dim]
    if dim % weight.dim() and isinstance(weight.form, ExpertForm) and not whole:
        return NotImplemented
    return QuantisedWeight(
        weight.form.narrow(dim % weight.dim(), first, max(0, last - first)),
        weight.samples if whole else None,
        part=weight.part or not whole,
    )


def _selected(weight: QuantisedWeight, dim: int, index: int) -> Any:
    """One expert."""
    if dim % weight.dim() or not isinstance(weight.form, ExpertForm):
        return NotImplemented
    return QuantisedWeight(weight.form.expert(index), part=True)


def _written(weight: QuantisedWeight, source: Tensor, non_blocking: bool = False) -> QuantisedWeight:
    if weight.part:
        raise _cannot_write(weight, "a part of it")
    if not isinstance(source, QuantisedWeight):
        source = source.expand(weight.shape).to(weight.dtype)
        weight.form.write(source)
        weight.samples = sampled(source)
        return weight
    if type(source.form) is not type(weight.form):
        return _written(weight, source.form.dense())
    weight.form.take(source.form)
    samples = source.samples
    weight.samples = None if samples is None else samples.to(weight.dtype).to(samples.dtype)
    return weight


_ATEN = torch.ops.aten
_SET_DATA = cast("Any", Tensor.data).__set__
_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_KEEP: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _shared,
    _ATEN.alias.default: _shared,
    _ATEN.clone.default: _cloned,
    _ATEN.empty_like.default: _like,
    _ATEN._to_copy.default: _moved,
    _ATEN.slice.Tensor: _sliced,
    _ATEN.select.int: _selected,
    _ATEN.copy_.default: _written,
}


# ------------------------------------------------------------------ its product


def _linear(x: Tensor, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear, under autocast too."""
    y = _times(x, weight, turned=True)
    return y if bias is None else y + bias.to(y.dtype)


def _times(x: Tensor, weight: QuantisedWeight, turned: bool = False) -> Tensor:
    """x W, or where it is turned x W^T, under autocast too."""
    if weight.requires_grad:
        raise _cannot_train(weight)
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    elif x.dtype != weight.dtype:  # torch's own error for a dense one
        raise RuntimeError(f"expected an input of {weight.dtype}, the weight's, but found {x.dtype}")
    y: Tensor = _Product.apply(x, weight.form, turned)  # type: ignore[no-untyped-call]  # torch's
    return y


def _is_plain(weight: QuantisedWeight) -> bool:
    """Whether its products are those of its values, [n, k]."""
    return weight.dim() == 2 and type(weight.form).dlinear is Form.dlinear


def _multiplied(x: Tensor, form: Form, turned: bool) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1])
        y = form.linear(rows) if turned else form.dlinear(rows)
        return y.view(*x.shape[:-1], y.shape[1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Form, turned: bool) -> Tensor:
        ctx.form, ctx.turned = form, turned
        return _multiplied(x, form, turned)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _multiplied(dy, ctx.form, not ctx.turned), None, None


# ------------------------------------------------------------------ layers and models


def dense_of(weight: Tensor) -> Tensor:
    """The values of a weight as a plain tensor: a quantised one's that its products see, else the tensor
    itself."""
    return weight.form.dense() if isinstance(weight, QuantisedWeight) else weight


def form_in(weight: Tensor) -> Form | None:
    """What a quantised weight is held in, of a shard this rank's part of it; None of a dense one."""
    with torch.no_grad():
        own = cast("Any", weight).to_local() if hasattr(weight, "to_local") else weight
    return own.form if isinstance(own, QuantisedWeight) else None


def bytes_a_number(form: Form | None, transposed: bool = False) -> float:
    """Of what is made dense for a product, 0 where nothing is: of eight-bit floats those of a transposed
    weight."""
    if form is None or (isinstance(form, Fp8) and not transposed):
        return 0.0
    return form.row_nbytes / form.shape[1:].numel()


def bytes_in(weight: Tensor) -> tuple[Tensor, ...]:
    """The plain tensors that a weight is held in."""
    return weight.form.tensors if isinstance(weight, QuantisedWeight) else (weight,)


def sampled(value: Tensor) -> Tensor:
    """A few values of a tensor, evenly spaced, in float64: of a quantised one, those of the dense weight it
    was made of."""
    if isinstance(value, QuantisedWeight) and value.samples is not None:
        return value.samples
    flat = dense_of(value.detach()).reshape(-1)
    places = sample_places(flat.numel())
    return flat[places.start : places.stop : places.step].double()


def sample_places(count: int) -> range:
    """Where among `count` values those of `sampled` lie."""
    step = max(1, count // POINTS)
    return range(step // 2, count, step)[:POINTS]


def form_of(weight: Tensor, name: str) -> type[Form]:
    """The form that `base_dtype` names, of a weight [n, k] or of one of experts [E, n, k]."""
    return EXPERT_FORMS[name] if weight.dim() == 3 else FORMS[name]


def quantised(weight: nn.Parameter, name: str) -> nn.Parameter:
    """`weight` [n, k], or of experts [E, n, k], which does not train, as a parameter in the form `name`;
    itself where it is quantised already."""
    if isinstance(weight, QuantisedWeight):
        return weight
    form = form_of(weight, name).of(weight.detach())
    return nn.Parameter(QuantisedWeight(form, sampled(weight)), requires_grad=False)


def quantised_in(model: nn.Module) -> Iterator[tuple[nn.Module, str, QuantisedWeight]]:
    """Every quantised weight of a model: (its module, its name there, itself)."""
    for module in model.modules():
        for name, value in module._parameters.items():
            if isinstance(value, QuantisedWeight):
                yield module, name, value


def restore_dense(model: nn.Module) -> None:
    """Put dense parameters with the same values in the place of quantised weights; a shared one stays
    shared."""
    made: dict[int, nn.Parameter] = {}
    for module, name, value in list(quantised_in(model)):
        made.setdefault(id(value), nn.Parameter(value.form.dense(), requires_grad=False))
        setattr(module, name, made[id(value)])
