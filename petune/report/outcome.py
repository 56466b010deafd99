"""How a run went, as parts of a page: its state, its scores and what came up.

Each part is a function of the run's files that gives HTML, empty where they say nothing of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from petune.report.conditions import data_facts
from petune.report.curves import curve, steps_said
from petune.report.files import RunFiles
from petune.report.markup import Markup, element, join, section, table
from petune.report.words import NONE, duration, figure, is_number, moment, setting, share, size

_ENDED = ("Error", "Fault", "Exception", "Interrupt")
_SCORES = {"loss": "loss (nats)"}


def heading(run: RunFiles) -> Markup:
    """The run's name, its state and what it is."""
    chips = [element("span", run.state, class_=f"chip {run.state}")]
    if run.read().faults:
        chips.append(element("span", "damaged", class_="chip damaged"))
    facts = [
        str(run.settings.get("model", "?")),
        run.method,
        _task(run),
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


def _task(run: RunFiles) -> str:
    """The task, and its loss or what else its settings begin with: prefer: dpo."""
    task = run.summary.get("task") or run.setup.get("task") or run.settings.get("task")
    settings = run.settings.get(str(task))
    first = next(iter(settings.values()), None) if isinstance(settings, Mapping) else None
    return f"{task}: {setting(first)}" if first is not None else str(task or "task by the data")


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
    alone = f"; a head alone reaches accuracy {figure(control)}" if is_number(control) else ""
    return f"untouched base → tuned{alone}"


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
    held = found.get("held_out") or data_facts(run).get("eval_rows")
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
    return section("Held-out rows, before and after", *_answer_scores(run.answers, len(rows)), *cards)


def _answer_scores(found: Mapping[str, Any], rows: int) -> list[Markup]:
    """Metrics of the answers, one row each."""
    base, tuned = (found.get("scores", {}).get(name, {}) for name in ("base", "tuned"))
    lines = [(name, figure(base.get(name)), figure(value)) for name, value in tuned.items()]
    heads = ("metric", "untouched base", "tuned")
    return [table(heads, lines, numbers=(1, 2), caption=f"{rows} generated answers")] if lines else []
