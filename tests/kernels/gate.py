"""What petune.kernels.triton launches, compiled for devices that are not here.

`python -m tests.kernels.gate [module ...]` compiles every variant of the modules named (all, without a name)
and prints a line for each.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.crossings import cover

ROOT = Path(__file__).parents[2]
PACKAGE = "petune.kernels.triton"
VARIANTS = "tests.kernels.variants"  # what its modules launch
# bytes a program may have, by compute capability (CUDA programming guide, table of limits)
SHARED = {80: 163 * 1024, 90: 227 * 1024}
HOPPER = 90
ROUNDS = "cvt.rn.satfinite.e4m3x2.f32"
Part = Literal["all", "crossed"]


class Compiled(NamedTuple):
    """One kernel for one architecture. shared: bytes a program takes; registers and spilled bytes of a
    thread; rounded: instructions that round two numbers to eight bits; error: why it failed."""

    kernel: str
    arch: int
    constexprs: str
    warps: int
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    rounded: int = 0
    error: str = ""


def modules() -> list[str]:
    """Every module of the package."""
    return [
        f"{PACKAGE}.{found.name}" for found in pkgutil.iter_modules([str(ROOT.joinpath(*PACKAGE.split(".")))])
    ]


def gate(names: list[str] | None = None, path: Path = ROOT, part: Part = "all") -> list[Compiled]:
    """Every variant of the modules, compiled in a process of its own: the interpreter is chosen at import.

    part: "all" compiles each for every architecture; "crossed" compiles so many that every dtype, constant
    and number of warps of a kernel is in one (tests/crossings.py), for the architectures in turn, each of
    which so compiles every kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given = os.environ.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), str(path), given)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.gate", "--json", part, *(names or modules())],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [Compiled(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def compiled(names: list[str], part: Part = "all") -> Iterator[Compiled]:
    """The same in this process, which must not interpret. A module of which nothing is said in
    tests/kernels/variants has no kernels of its own."""
    for name in names:
        said = name.replace(PACKAGE, VARIANTS)
        found = list(importlib.import_module(said).variants()) if find_spec(said) else []
        both = list(zip(found, _architectures(found, part), strict=True))
        for variant, archs in both + [(one, [HOPPER]) for one in _native(found)]:
            kernel, signature, constexprs, warps, stages = variant
            for arch in archs:
                row = Compiled(
                    f"{name.rpartition('.')[2]}.{kernel.__name__}", arch, _shown(constexprs), warps
                )
                try:
                    yield row._replace(**_built(kernel, signature, constexprs, warps, stages, arch))
                except Exception as error:
                    yield row._replace(error=f"{type(error).__name__}: {error}")


def _native(variants: list[Any]) -> list[Any]:
    """The first that rounds to eight bits, by the instruction that no device before Hopper has."""
    by_hand = [one for one in variants if one[2].get("NATIVE") is False][:1]
    return [(*one[:2], one[2] | {"NATIVE": True}, *one[3:]) for one in by_hand]


def _architectures(variants: list[Any], part: Part) -> list[list[int]]:
    """For which architectures each variant is compiled."""
    every = list(SHARED)
    if part == "all":
        return [every for _ in variants]
    found, places = [list[int]() for _ in variants], defaultdict[str, list[int]](list)
    for place, (kernel, *_) in enumerate(variants):
        places[kernel.__name__].append(place)
    for own in places.values():
        chosen = sorted(cover([_cell(*variants[place]) for place in own], 1))
        for turn, at in enumerate(chosen):
            found[own[at]] = [every[turn % len(every)]] if len(chosen) > 1 else every
    return found


def _cell(
    kernel: Any, signature: dict[str, str], constexprs: dict[str, Any], warps: int, stages: int
) -> tuple[str, ...]:
    """A variant as a cell of a crossing: what each argument is."""
    values = {**signature, **constexprs}
    return (*(str(values.get(name)) for name in kernel.arg_names), str(warps), str(stages))


def _shown(constexprs: dict[str, Any]) -> str:
    return " ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in constexprs.items())


def _built(
    kernel: Any, signature: dict[str, str], constexprs: dict[str, Any], warps: int, stages: int, arch: int
) -> dict[str, int]:
    """What the compiled kernel takes. Pointers and integers are said to be multiples of 16, as in large
    models they are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: "constexpr" if name in constexprs else signature[name] for name in kernel.arg_names}
    even = [
        (place,)
        for place, kind in enumerate(types.values())
        if kind.startswith("*") or kind in ("i32", "i64")
    ]
    source = ASTSource(kernel, types, constexprs, {place: [["tt.divisibility", 16]] for place in even})
    built = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, "num_stages": stages}
    )
    rounded = built.asm["ptx"].count(ROUNDS)
    return {"shared": built.metadata.shared, "rounded": rounded, **_resources(built.asm["cubin"])}


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers and spilled bytes of a thread, as the toolkit's own reader of binaries that comes with Triton
    counts them."""
    import triton

    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([reader, "-res-usage", file.name], capture_output=True, text=True).stdout
    counts = {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", shown)}
    return {"registers": counts["REG"], "spilled": counts["STACK"]}


def _main(arguments: list[str]) -> None:
    if arguments[:1] == ["--json"]:
        part: Any = arguments[1]
        print(json.dumps(list(compiled(arguments[2:], part))))
        return
    for row in gate([name if "." in name else f"{PACKAGE}.{name}" for name in arguments]):
        print(
            f"{row.kernel:<32} sm_{row.arch} warps {row.warps:>2} shared {row.shared:>7,} registers"
            f" {row.registers:>3} spilled {row.spilled:>4}  {row.constexprs}  {row.error}".rstrip()
        )


if __name__ == "__main__":
    _main(sys.argv[1:])
