"""What a run was made of, as parts of a page: data, settings, memory, plan, machine, and its commands.

Each part is a function of the run's files that gives HTML, empty where they say nothing of it.
"""

from __future__ import annotations

import base64
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from petune.errors import PetuneError
from petune.recipe import load_recipe
from petune.report.files import RunFiles
from petune.report.markup import Markup, element, folded, join, section, table
from petune.report.words import figure, flat, is_number, setting, share, size

_SHOWN_CLASSES = 40
_OF_THE_FOLDER = ("version", "name", "out")  # settings that the head of the page says already


def data_facts(run: RunFiles) -> Mapping[str, Any]:
    """What setup.json says of the rows; empty where it says nothing."""
    found = run.setup.get("data")
    return found if isinstance(found, Mapping) else {}


def data(run: RunFiles) -> Markup:
    """Rows, lengths, cuts, classes, and the share that trains."""
    found = data_facts(run)
    if not found:
        return Markup()
    rows, read = found["rows"], found["rows"] + found["dropped"]
    half, most, longest = (figure(found[key]) for key in ("p50", "p95", "longest"))
    side = found["truncation"]
    cut = f"{figure(found['truncated'])} rows ({share(found['truncated'], read)}), on the {side}"
    dropped = f"{figure(found['dropped'])} rows to train on, {figure(found['eval_dropped'])} held out"
    facts = [
        ("rows to train on", figure(rows)),
        ("rows held out", figure(found["eval_rows"])),
        ("tokens a row", f"half up to {half}, 95 % up to {most}, longest {longest}"),
        ("limit", f"{figure(found['limit'])} tokens"),
        *([("cut", cut)] if side else []),
        ("dropped", dropped),
    ]
    if found.get("trained") is not None:
        part = share(found["trained"], found["tokens"])
        facts.append(
            ("tokens that train", f"{figure(found['trained'])} of {figure(found['tokens'])} ({part})")
        )
    if found.get("bins") is not None:
        facts.append(("packed", f"into {figure(found['bins'])} sequences"))
    notes = [element("li", str(note)) for note in (*found.get("sources", ()), *found.get("notes", ()))]
    return section(
        "Data",
        table(("", ""), facts),
        element("ul", *notes, class_="notes") if notes else "",
        element("div", _lengths(found), _classes(found), class_="pair"),
    )


def _lengths(found: Mapping[str, Any]) -> Markup:
    bins = found.get("lengths") or ()
    limit = found["limit"]
    bars = [
        (f"{low:,}" + f" to {high:,}" * (high > low) + (" (cut)" if low > limit else ""), count)
        for low, high, count in bins
    ]
    return _bars("Lengths of rows, tokens before cutting", bars)


def _classes(found: Mapping[str, Any]) -> Markup:
    sides = found.get("classes") or {}
    drawn = []
    for side, counts in sides.items():
        shown = sorted(counts.items(), key=lambda one: -one[1])[:_SHOWN_CLASSES]
        rest = len(counts) - len(shown)
        drawn.append(_bars(f"{side}{f' (the {len(shown)} most frequent)' if rest else ''}", shown))
    return join(drawn)


def _bars(title: str, bars: Sequence[tuple[str, int]]) -> Markup:
    """Counts as a table with a bar in each row."""
    most = max((count for _, count in bars), default=0)
    if not most:
        return Markup()
    rows = [
        (
            str(name),
            element("span", class_="bar", style=f"--w:{100 * count / most:.1f}%", aria_hidden="true")
            if count
            else "",
            figure(count),
        )
        for name, count in bars
    ]
    return table(("", "", ""), rows, numbers=(2,), caption=title)


# ---------------------------------------------------------------- what was asked, where and by what


def asked(run: RunFiles) -> Markup:
    """What was chosen, then every setting, without the comments of the recipe, which may be nobody else's
    business."""
    rows = list(flat(run.settings).items())
    settings = chosen(run)
    words = "Settings that are not the default; what is not here was left as it is."
    parts = [table(("setting", "value"), settings, caption=words)] if settings else []
    if rows:
        parts.append(
            folded(f"All {len(rows)} settings, defaults included", table(("setting", "value"), rows))
        )
    method = run.setup.get("method")
    counts = run.setup.get("parameters") or {}
    facts = [("method", str(method))] if method else []
    if is_number(counts.get("total")):
        part = share(counts["trained"], counts["total"])
        facts.append(("parameters that train", f"{counts['trained']:,} of {counts['total']:,} ({part})"))
    if steps := run.setup.get("steps"):
        each = f"{figure(steps['per_step'])} {steps['unit']}"
        facts.append(("steps", f"{figure(steps['total'])} of {each}, {figure(steps['per_epoch'])} an epoch"))
    facts += [("numbers", str(run.setup["numbers"]))] if "numbers" in run.setup else []
    return section("What was asked", table(("", ""), facts) if facts else "", *parts)


def chosen(run: RunFiles) -> list[tuple[str, str]]:
    """The settings in which the run differs from one that says only its model, data and method; none where
    this petune knows no such method."""
    method = run.settings.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    try:
        usual = flat(load_recipe({"model": "-", "data": "-", "method": name}).resolved())
    except PetuneError:
        return []
    return [
        (key, value)
        for key, value in flat(run.settings).items()
        if usual.get(key) != value and key not in _OF_THE_FOLDER
    ]


def memory(run: RunFiles) -> Markup:
    """Bytes by what holds them, of the fullest process: as predicted, and as measured."""
    measured = _fullest(run.summary.get("memory"), "peak")
    predicted = _fullest(run.forecast.get("ranks"), "total")
    if not measured and not predicted:
        return Markup()
    names = {
        "frozen": "frozen weights",
        "tuned": "tuned weights",
        "optimizer": "optimizer's state",
        "rest": "gradients, activations and the rest",
        "peak": "in all, at the peak",
    }
    if predicted:
        predicted = dict(predicted) | {"peak": predicted["total"]}
    rows = []
    for key, name in names.items():
        both = [_held(side, key) if side else None for side in (predicted, measured)]
        rows.append((name, *map(size, both)))
    on_gpu = "cuda" in str(run.setup.get("numbers"))
    where = "of a GPU's allocator" if on_gpu else "resident, the interpreter included"
    words = f"Of the process that held most. Measured: {where}."
    if not predicted:
        words += f" To predict it as well: petune report {run.path} --forecast"
    heads = ("held by", "predicted", "measured")
    return section("Memory", table(heads, rows, numbers=(1, 2), caption=words))


def _fullest(ranks: object, key: str) -> Mapping[str, Any]:
    found: list[Mapping[str, Any]] = list(ranks) if isinstance(ranks, list) else []
    return max(found, key=lambda rank: float(rank[key]), default={})


def _held(side: Mapping[str, Any], key: str) -> float | None:
    known = ("frozen", "tuned", "optimizer")
    value = side["peak"] - sum(side[name] for name in known) if key == "rest" else side.get(key)
    return max(0.0, value) if is_number(value) else None


def plan(run: RunFiles) -> Markup:
    """Who holds what under a parallel plan, with the memory each process took."""
    found = run.setup.get("plan") or {}
    ranks = found.get("ranks") or ()
    if not ranks:
        return Markup()
    peaks = {at: one.get("peak") for at, one in enumerate(run.summary.get("memory") or ())}
    keys = [
        key
        for key in ("blocks", "heads", "columns", "tokens", "rows")
        if any(rank.get(key) for rank in ranks)
    ]
    heard = _heard(run.ranks)
    rows = [
        (
            str(at),
            *(setting(rank.get(key)) for key in keys),
            *([size(peaks[at])] if at in peaks else []),
            *(heard.get(at, ("",) * len(HEARD)) if heard else ()),
        )
        for at, rank in enumerate(ranks)
    ]
    heads = ("rank", *keys, *(["peak memory"] if peaks else []), *(HEARD if heard else ()))
    words = f"{found.get('words')}: what each process holds."
    holds = table(heads, rows, caption=words, numbers=range(2, len(heads)))
    return section("Parallel plan", holds, _schedule(run))


HEARD = ("device", "step", "s a step", "peak so far", "heard")  # of a rank of a run in progress


def _heard(told: Mapping[str, Any]) -> dict[int, tuple[str, ...]]:
    """What ranks last said of themselves, by rank; of those that the first rank hears."""
    at, ranks = told.get("at"), told.get("ranks")
    since = max(0.0, time.time() - at) if is_number(at) else 0.0
    found: dict[int, tuple[str, ...]] = {}
    for one in ranks if isinstance(ranks, list) else ():
        if not isinstance(one, Mapping) or not all(map(is_number, map(one.get, ("rank", "age_s", "step")))):
            continue
        work = one.get("work")
        seconds, peak, device = work if isinstance(work, list) and len(work) == 3 else (None, None, "")
        age = f"{one['age_s'] + since:.0f} s ago"
        found[int(one["rank"])] = str(device), figure(one["step"] + 1), figure(seconds), size(peak), age
    return found


def _schedule(run: RunFiles) -> Markup:
    """Who computes and sends what when, as `petune plan --svg` draws it; a picture, in which nothing runs."""
    drawn = run.forecast.get("schedule")
    if not drawn:
        return Markup()
    source = "data:image/svg+xml;base64," + base64.b64encode(str(drawn).encode()).decode()
    return element("div", element("img", src=source, alt="The schedule of a step"), class_="wide")


def environment(run: RunFiles) -> Markup:
    """Versions and machine; the end of the log."""
    found = {key: value for key, value in run.environment.items() if key != "run_id"}
    rows = [(name.removeprefix("packages."), value) for name, value in flat(found).items()]
    names = (("run_id", "run"), ("rows", "rows, SHA-256"), ("tuned_sha256", "tuned/, SHA-256"))
    marks = {**run.environment, **run.summary}
    rows += [(name, str(marks[key])) for key, name in names if marks.get(key)]
    log = [folded("The end of the log", element("pre", "\n".join(run.log)))] if run.log else []
    return section("Environment", table(("", ""), rows) if rows else "", *log)


def commands(run: RunFiles) -> Markup:
    """What to type to make the run again, to go on with it and to use it."""
    path = shlex.quote(str(run.path))
    lines = list(_lines(run, path))
    shown = "\n".join(f"{command:<{max(len(one) for one, _ in lines)}}  # {what}" for command, what in lines)
    return section("Commands", element("pre", element("code", shown)))


def _lines(run: RunFiles, path: str) -> Iterator[tuple[str, str]]:
    if str(run.settings.get("model", "")).startswith("object:"):
        yield f'petune.load_run("{run.path}", base=model)', "the model was given in Python: from there"
    else:
        yield f"petune train {path}/resolved.yaml out=runs/again", "make it again"
        if run.state == "finished":
            yield f"petune eval {path}", "score it again"
            yield f'petune generate {path} "..."', "ask it"
        else:
            yield f"petune train {path} --resume", "go on with it"
    yield f"petune doctor {path}", "test every file against its hash"
    yield f"petune report {path}", "make this page again"
