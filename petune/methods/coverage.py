"""What a tuning reaches of a model with routed experts or with mixers, in one line before anything trains:
experts, shared experts, dense MLPs, routers, mixers and attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from torch import nn

from petune.methods.wrapped import tuning
from petune.models import family_of
from petune.models.experts import is_experts, weights_of
from petune.models.spec import LinearAttention, RoutedMlp, StackRule, child_of, stack_paths
from petune.models.stack import Stack
from petune.models.tuned_linear import TunedLayer

_ORDER = ("experts", "shared", "dense", "router", "mixer", "attention")


def coverage(model: nn.Module, base_dtype: str | None = None) -> str | None:
    """One line, "experts 128/128 in nf4, shared 1/1, router frozen, attention 4/4", or None for a model
    without experts and mixers. base_dtype: in which they are to be held; of methods that have no targets it
    is all that is said.

    Counted are experts of a block whose weights are tuned, shared experts, and linears of the rest, with
    mixers' what stays frozen beside them; blocks that differ are counted apart. Raises UsageError for a model
    that is not wrapped.
    """
    held = "" if base_dtype is None else f" in {base_dtype}"
    experts, family = [one for one in model.modules() if is_experts(one)], family_of(model)
    if not experts and not (family and any(rule.linear for rule in family.stacks.values())):
        return None
    if not hasattr(tuning(model).config, "targets"):
        return f"experts{held}" if held and experts else None
    if family is None:
        found = Counter(("experts", _of_experts(one)) for one in experts)
    else:
        found = Counter(
            kind_and_words
            for stack, path in stack_paths(model, family).items()
            for block in _blocks(model.get_submodule(path))
            for kind_and_words in _of_block(block, family.stacks[stack])
        )
    parts = []
    for kind in _ORDER:
        words = [(said, count) for (name, said), count in found.items() if name == kind]
        form = held * (kind == "experts")
        parts += [f"{kind} {said}{form}" + f" in {count} blocks" * (len(words) > 1) for said, count in words]
    return ", ".join(parts)


def _blocks(stack: nn.Module) -> list[nn.Module]:
    return stack.blocks if isinstance(stack, Stack) else list(stack.children())


def _of_block(block: nn.Module, rule: StackRule) -> Iterator[tuple[str, str]]:
    """(kind, words) of each part of a block."""
    cores = [one.core for one in rule.sublayers_in(block)]
    mixers = {core.at for core in cores if isinstance(core, LinearAttention)}
    routed = [core for core in cores if isinstance(core, RoutedMlp)]
    shared = {core.shared.region.enter for core in routed if core.shared}
    for core in routed:
        router = block.get_submodule(core.router)
        yield "router", "trains" if any(one.requires_grad for one in router.parameters()) else "frozen"
    for region in rule.regions_in(block):
        found = [hit[1] for path in region.sites.values() if (hit := child_of(block, path)) is not None]
        tuned = sum(isinstance(layer, TunedLayer) for layer in found)
        if "experts" in region.sites:
            yield "experts", _of_experts(found[0])
        elif region.enter in mixers:
            frozen = _frozen(block.get_submodule(region.enter), found)
            yield "mixer", f"{tuned}/{len(found)}" + f" ({', '.join(frozen)} frozen)" * bool(frozen)
        elif region.enter in shared:
            yield (
                "shared",
                f"{int(tuned > 0)}/1" if tuned in (0, len(found)) else f"{tuned}/{len(found)} linears",
            )
        else:
            yield "attention" if region.kind == "attention" else "dense", f"{tuned}/{len(found)}"


def _frozen(mixer: nn.Module, linears: Collection[nn.Module]) -> list[str]:
    """What of a mixer stays as it is beside its linears."""
    counted = {id(value) for one in linears for value in one.parameters()}
    still = ((name, value) for name, value in mixer.named_parameters() if not value.requires_grad)
    return list(dict.fromkeys(name.partition(".")[0] for name, value in still if id(value) not in counted))


def _of_experts(module: nn.Module) -> str:
    experts, weights = len(module.get_parameter(weights_of(module)[0])), weights_of(module)
    tuned = [one for one in module.weights if one in weights] if isinstance(module, TunedLayer) else []
    alone = f" ({', '.join(tuned)} alone)" if 0 < len(tuned) < len(weights) else ""
    return f"{experts if tuned else 0}/{experts}{alone}"
