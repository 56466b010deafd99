"""The parts of a page about one run, in the order in which they are read. Each is a function of the run's
files that gives HTML, empty where they say nothing of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from petune.report.curves import curve, steps_said
from petune.report.files import RunFiles
from petune.report.markup import Markup, element, folded, join, table
from petune.report.words import NONE, duration, figure, flat, is_number, moment, setting, share, size

_T = TypeVar("_T")
_ENDED = ("Error", "Fault", "Exception", "Interrupt")
_SHOWN_CLASSES = 40
_SCORES = {"perplexity": "perplexity", "loss": "loss (nats)"}


def guarded(part: Callable[[_T], Markup], of: _T) -> Markup:
    """A part of a page; where what it reads is damaged, a line that says so in its place."""
    try:
        return part(of)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        name = part.__name__.replace("_", " ")
        return element(
            "p", f"This part ({name}) cannot be shown: {type(error).__name__}: {error}", class_="bad"
        )


def section(title: str, *inside: str) -> Markup:
    """A part under its heading; empty where nothing is inside."""
    return element("section", element("h2", title), *inside) if any(inside) else Markup()


# ---------------------------------------------------------------- how it went


def heading(run: RunFiles) -> Markup:
    """The run's name, its state and what it is."""
    chips = [element("span", run.state, class_=f"chip {run.state}")]
    if run.read().faults:
        chips.append(element("span", "damaged", class_="chip damaged"))
    facts = [
        str(run.settings.get("model", "?")),
        run.method,
        str(
            run.summary.get("task") or run.setup.get("task") or run.settings.get("task") or "task by the data"
        ),
        run.plan,
        f"begun {moment(run.began)}",
    ]
    return join(
        (
            element("h1", run.name, " ", *chips),
            element("p", " · ".join(facts), class_="facts"),
            element("p", element("code", str(run.path)), class_="facts"),
            progress(run) if run.state != "finished" else "",
        )
    )


def progress(run: RunFiles) -> Markup:
    """How far a run is that has not finished."""
    if run.planned is None:
        return element("p", f"step {run.step:,}")
    steps = [record for record in run.records if is_number(record.get("tokens_per_s"))]
    words = f"step {run.step:,} of {run.planned:,}"
    if run.state == "running" and len(steps) > 1 and (left := _seconds_left(run, steps)) is not None:
        words += f", about {duration(left)} of steps left"
    bar = element("progress", value=min(run.step, run.planned), max=run.planned)
    return element("p", bar, " ", words, class_="progress")


def _seconds_left(run: RunFiles, steps: Sequence[Mapping[str, Any]]) -> float | None:
    """By the speed of the last steps; evaluations and saves do not count."""
    last = steps[-20:]
    tokens = [b["tokens"] - a["tokens"] for a, b in pairwise(last)]
    seconds = [n / b["tokens_per_s"] for n, b in zip(tokens, last[1:], strict=True) if b["tokens_per_s"]]
    each = sum(seconds) / len(seconds) if seconds else 0.0
    return each * ((run.planned or 0) - run.step) if each > 0 else None


def key_figures(run: RunFiles) -> Markup:
    """What a person asks first: better than the base, by how much, in what time and memory."""
    found, cards = run.summary, []
    before, after = run.score("before"), run.score("after")
    if after is not None:
        base = NONE if before is None else figure(before)
        cards.append((f"{run.metric}, held out", f"{base} → {figure(after)}", _against(run)))
    losses = curve(run.records, "loss", "loss").points
    if losses:
        cards.append(
            (
                "training loss",
                f"{figure(losses[0][1])} → {figure(losses[-1][1])}",
                "nats, first and last step",
            )
        )
    cards.append(("steps", figure(run.step), f"of {run.planned:,} planned" if run.planned else ""))
    speed = found.get("tokens_per_s", _latest(run, "tokens_per_s"))
    if is_number(speed):
        cards.append(("tokens/s", f"{speed:,.0f}", f"{figure(_latest(run, 'tokens'))} tokens in all"))
    if "seconds" in found:
        cards.append(("time in steps", duration(found["seconds"]), ""))
    if "peak_memory_bytes" in found:
        cards.append(("peak memory", size(found["peak_memory_bytes"]), "of the fullest process"))
    items = [
        element("div", element("dt", name), element("dd", value), element("p", note) if note else "")
        for name, value, note in cards
    ]
    return element("dl", *items, class_="cards")


def _against(run: RunFiles) -> str:
    control = run.summary.get("head_only")
    words = ["untouched base → tuned"]
    if is_number(control):
        words.append(f"a head alone reaches accuracy {figure(control)}")
    return "; ".join(words)


def _latest(run: RunFiles, key: str) -> Any:
    return next((record[key] for record in reversed(run.records) if key in record), None)


def warnings(run: RunFiles) -> Markup:
    """Everything that came up: damage, why the run is no success, spikes, values that are no number, and what
    ended it."""
    lines = [("bad", f"Damaged: {fault}") for fault in run.read().faults]
    lines += [("bad", str(line)) for line in run.summary.get("warnings", ())]
    for key, name in (
        ("loss", "The training loss"),
        ("grad_norm", "The gradient norm"),
        ("eval_loss", "The held-out loss"),
    ):
        if broken := curve(run.records, key, name).broken:
            lines.append(("bad", f"{name} is no finite number at {steps_said(broken)}."))
    spikes = [record for record in run.records if "spike" in record]
    lines += [
        ("note", f"Step {record['step']:,} spiked: {setting(record['spike'])}.") for record in spikes[:10]
    ]
    lines += [("note", f"… and {len(spikes) - 10:,} spikes more.")] if len(spikes) > 10 else []
    lines += [("note", str(line)) for line in (*run.setup.get("warnings", ()), *run.summary.get("notes", ()))]
    if run.state == "stopped":
        way = f"go on with: petune train {shlex.quote(str(run.path))} --resume"
        lines.append(("note", f"The run stopped at step {run.step:,}{_why(run)}; {way}"))
    items = [element("li", line, class_=kind) for kind, line in lines]
    return section("Warnings", element("ul", *items, class_="warnings")) if items else Markup()


def _why(run: RunFiles) -> str:
    """The last error in the log, if it is of a run that did not go on."""
    for line in reversed(run.log[-8:]):
        name, colon, _ = line.partition(":")
        if colon and name.rpartition(".")[2].endswith(_ENDED):
            return f" ({line[:300]})"
    return ""


# ---------------------------------------------------------------- scores


def evaluation(run: RunFiles) -> Markup:
    """Every metric of the untouched base, of the control and of the tuned model; the confusion of classes."""
    found = run.summary
    sides = {"untouched base": found.get("before"), "tuned": found.get("after")}
    best, steps = found.get("best_step"), found.get("steps")
    if best is not None and best != steps:
        sides = {"untouched base": found.get("before"), f"tuned (step {best})": found.get("after")}
        sides[f"last (step {steps})"] = found.get("last")
    if not found:
        scored = [record for record in run.records if any(key.startswith("eval_") for key in record)]
        sides = {"untouched base": _scores(scored, first=True), "tuned, latest": _scores(scored, first=False)}
    if isinstance(tuned := run.scores.get("tuned"), Mapping):
        sides[f"petune eval, {figure(run.scores.get('rows'))} rows"] = tuned
    columns = {name: scores for name, scores in sides.items() if isinstance(scores, Mapping) and scores}
    names = list(dict.fromkeys(name for scores in columns.values() for name in scores))
    control = found.get("head_only")
    heads = ["metric", *columns, *(["a head alone"] if is_number(control) else [])]
    rows = [
        [
            _SCORES.get(name, name) + (" *" if name == run.metric else ""),
            *(figure(scores.get(name)) for scores in columns.values()),
            *([figure(control) if name == "accuracy" else NONE] if is_number(control) else []),
        ]
        for name in names
    ]
    held = found.get("held_out") or _data(run).get("eval_rows")
    words = f"On {figure(held)} held-out rows. * decides which state is kept." if held else ""
    shown = table(heads, rows, numbers=range(1, len(heads)), caption=words) if names else Markup()
    return section("Evaluation", shown, confusion(run))


def _scores(records: Sequence[Mapping[str, Any]], *, first: bool) -> Mapping[str, Any]:
    chosen = [record for record in records if (record["step"] == 0) == first]
    last = chosen[-1] if chosen else {}
    return {key.removeprefix("eval_"): value for key, value in last.items() if key.startswith("eval_")}


def confusion(run: RunFiles) -> Markup:
    """What rows of each class were taken for: by the untouched base and by what tuned/ holds."""
    labels = [str(name) for name in run.setup.get("labels") or ()]
    tables: dict[int, Any] = {
        record["step"]: record["confusion"] for record in run.records if "confusion" in record
    }
    tuned = {step: counts for step, counts in tables.items() if step}
    best = run.summary.get("best_step")
    chosen = best if isinstance(best, int) and best in tuned else max(tuned, default=0)
    drawn = [
        _matrix(title, labels, counts)
        for title, counts in (("untouched base", tables.get(0)), (f"tuned, step {chosen}", tuned.get(chosen)))
        if counts is not None
    ]
    if not drawn:
        return Markup()
    words = "Rows: the class a text has. Columns: the class it was taken for. The diagonal is right."
    return join(
        (element("h3", "Confusion of classes"), element("p", words), element("div", *drawn, class_="pair"))
    )


def _matrix(title: str, labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Markup:
    names = [labels[at] if at < len(labels) else str(at) for at in range(len(counts))]
    rows = []
    for name, row in zip(names, counts, strict=True):
        whole = sum(row)
        cells = [element("th", name, scope="row")]
        for at, count in enumerate(row):
            shade = f"--s:{100 * count / whole:.0f}%" if whole else None
            right = " right" if names[at] == name else ""
            cells.append(element("td", figure(count), class_=f"n shade{right}", style=shade))
        cells.append(element("td", share(row[names.index(name)], whole), class_="n"))
        rows.append(element("tr", *cells))
    heads = [element("th", name, scope="col", class_="n") for name in ("", *names, "recall")]
    whole_table = element(
        "table", element("caption", title), element("thead", element("tr", *heads)), element("tbody", *rows)
    )
    return element("div", whole_table, class_="wide")


def answers(run: RunFiles) -> Markup:
    """Held-out rows: what was asked, what was wanted, and what the base and the tuned model said."""
    rows = run.answers.get("rows", ())
    cards = [
        element(
            "article",
            *(
                element("div", element("h4", name), element("pre", str(row[key])))
                for key, name in (
                    ("prompt", "asked"),
                    ("expected", "wanted"),
                    ("base", "untouched base"),
                    ("tuned", "tuned"),
                )
                if row.get(key) is not None
            ),
        )
        for row in rows
    ]
    return section("Held-out rows, before and after", *cards)


# ---------------------------------------------------------------- what went in


def _data(run: RunFiles) -> Mapping[str, Any]:
    found = run.setup.get("data")
    return found if isinstance(found, Mapping) else {}


def data(run: RunFiles) -> Markup:
    """Rows, lengths, cuts, classes, and the share that trains."""
    found = _data(run)
    if not found:
        return Markup()
    rows, read = found["rows"], found["rows"] + found["dropped"]
    half, most, longest = (figure(found[key]) for key in ("p50", "p95", "longest"))
    cut = (
        f"{figure(found['truncated'])} rows ({share(found['truncated'], read)}), on the {found['truncation']}"
    )
    dropped = f"{figure(found['dropped'])} rows to train on, {figure(found['eval_dropped'])} held out"
    facts = [
        ("rows to train on", figure(rows)),
        ("rows held out", figure(found["eval_rows"])),
        ("tokens a row", f"half up to {half}, 95 % up to {most}, longest {longest}"),
        ("limit", f"{figure(found['limit'])} tokens"),
        ("cut", cut),
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
            element("span", class_="bar", style=f"--w:{100 * count / most:.1f}%", aria_hidden="true"),
            figure(count),
        )
        for name, count in bars
    ]
    return table(("", "", ""), rows, numbers=(2,), caption=title)


# ---------------------------------------------------------------- what was asked, where and by what


def asked(run: RunFiles) -> Markup:
    """The recipe as it was written, and every setting it meant."""
    rows = list(flat(run.settings).items())
    written = element("pre", run.written) if run.written.strip() else ""
    parts = [folded("The recipe as it was written", written)] if written else []
    parts += (
        [folded(f"All {len(rows)} settings, defaults included", table(("setting", "value"), rows))]
        if rows
        else []
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
    where = (
        "of a GPU's allocator"
        if "cuda" in str(run.setup.get("numbers"))
        else "resident, the interpreter included"
    )
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
    rows = [
        (str(at), *(setting(rank.get(key)) for key in keys), *([size(peaks[at])] if at in peaks else []))
        for at, rank in enumerate(ranks)
    ]
    heads = ("rank", *keys, *(["peak memory"] if peaks else []))
    words = f"{found.get('words')}: what each process holds."
    return section("Parallel plan", table(heads, rows, caption=words, numbers=range(2, len(heads))))


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
