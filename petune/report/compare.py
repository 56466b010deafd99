"""Several runs side by side: what came out, what differs, and their curves one over another."""

from __future__ import annotations

from collections.abc import Sequence

from petune.report.conditions import chosen
from petune.report.curves import curve, smoothed
from petune.report.files import RunFiles, names_of
from petune.report.markup import Markup, element, join, section, table
from petune.report.svg import POINTS, DrawnLine, chart, legend
from petune.report.words import NONE, duration, figure, flat, is_number, moment, size, titled

# of metrics.jsonl: the key and its title
_STEPS = (
    ("lr", "Learning rate"),
    ("grad_norm", "Gradient norm"),
    ("tokens_per_s", "Tokens per second"),
    ("expert_load", "Load of the busiest expert over the mean"),
)
_NAMES_OF_A_RUN = ("name", "out")  # settings in which runs always differ


def came_out(runs: Sequence[RunFiles]) -> Markup:
    """A row for each run: how far it came, its scores, cost and warnings."""
    heads = (
        "run",
        "state",
        "begun",
        "steps",
        "metric",
        "untouched base",
        "tuned",
        "last loss",
        "time",
        "tokens/s",
        "peak memory",
        "warnings",
    )
    rows = []
    for name, run in zip(names_of(runs), runs, strict=True):
        found, losses = run.read().summary, curve(run.records, "loss", "").points
        rows.append(
            (
                name,
                run.state + (", damaged" if run.faults else ""),
                element("time", moment(run.began)),
                figure(run.step) + (f" of {run.planned:,}" if run.planned not in (None, run.step) else ""),
                run.metric,
                figure(run.score("before")),
                figure(run.score("after")),
                figure(losses[-1][1]) if losses else NONE,
                duration(found.get("seconds")),
                f"{found['tokens_per_s']:,.0f}" if is_number(found.get("tokens_per_s")) else NONE,
                size(found.get("peak_memory_bytes")),
                str(len(found["warnings"])) if isinstance(found.get("warnings"), list) else NONE,
            )
        )
    return section("What came out", table(heads, rows, numbers=range(5, len(heads))))


def differences(runs: Sequence[RunFiles]) -> Markup:
    """The settings that are not the same in all runs, a column for each run. Of those that some methods alone
    have, the ones that somebody chose."""
    settings = [{key: value for key, value in flat(run.settings).items() if value != "{}"} for run in runs]
    asked = [dict(chosen(run)) or one for run, one in zip(runs, settings, strict=True)]
    told = set(settings[0]).intersection(*settings).union(*asked)
    rows = [
        (key, *(one.get(key, NONE) for one in settings))
        for key in dict.fromkeys(key for one in settings for key in one)
        if key in told and len({one.get(key) for one in settings}) > 1 and key not in _NAMES_OF_A_RUN
    ]
    shown = table(("setting", *names_of(runs)), rows) if rows else element("p", "All settings are the same.")
    return section("What differs", shown)


def curves(runs: Sequence[RunFiles]) -> Markup:
    """Loss, learning rate, gradient norm, speed and every score of the evaluations: one run, or several in
    colours of their own."""
    most = max(60, POINTS // len(runs))
    names = names_of(runs) if len(runs) > 1 else [""]
    drawn = [_loss(runs, names, most), *_scores(runs, names, most)]
    drawn += [
        chart(
            title,
            [
                DrawnLine(curve(run.records, key, name or title.lower()), at)
                for at, (name, run) in _numbered(names, runs)
            ],
            most=most,
            log=key == "grad_norm",
        )
        for key, title in _STEPS
    ]
    if not any(drawn):
        return Markup()
    keys = (
        [(name, at) for at, name in enumerate(names)] if len(runs) > 1 else [("training", 0), ("held out", 1)]
    )
    best = "" if len(runs) > 1 else _best(runs[0])
    return section("Curves", legend(keys), element("div", join(drawn), class_="charts"), best)


def _numbered(names: Sequence[str], runs: Sequence[RunFiles]) -> list[tuple[int, tuple[str, RunFiles]]]:
    return list(enumerate(zip(names, runs, strict=True)))


def _loss(runs: Sequence[RunFiles], names: Sequence[str], most: int) -> Markup:
    """The loss of each step, faint, and its mean before it; of one run the held-out loss too."""
    lines, alone = [], len(runs) == 1
    for at, (name, run) in _numbered(names, runs):
        steps = curve(run.records, "loss", name or "loss")
        lines.append(DrawnLine(steps, at, "faint"))
        lines.append(DrawnLine(smoothed(steps, most // 3), at, hover=False))
        if alone:
            lines.append(DrawnLine(curve(run.records, "eval_loss", "held out"), 1, "dotted"))
    marks = _marks(runs[0]) if alone else ()
    return chart("Training loss, nats" if not alone else "Loss, nats", lines, marks=marks, most=most)


def _scores(runs: Sequence[RunFiles], names: Sequence[str], most: int) -> list[Markup]:
    """A chart for each score of the evaluations; of one run the loss is in its first chart already."""
    keys = dict.fromkeys(
        key for run in runs for record in run.records for key in record if key.startswith("eval_")
    )
    shown = [key for key in keys if key != "eval_loss" or len(runs) > 1]
    colour = 1 if len(runs) == 1 else 0
    return [
        chart(
            f"{titled(key.removeprefix('eval_'))}, held out",
            [
                DrawnLine(curve(run.records, key, name or "held out"), at + colour, "dotted")
                for at, (name, run) in _numbered(names, runs)
            ],
            marks=_marks(runs[0]) if len(runs) == 1 else (),
            most=most,
        )
        for key in shown
    ]


def _marks(run: RunFiles) -> tuple[int, ...]:
    best = run.summary.get("best_step")
    return (best,) if isinstance(best, int) else ()


def _best(run: RunFiles) -> Markup:
    words = [f"The upright mark is step {figure(step)}, the state that tuned/ holds." for step in _marks(run)]
    return join(element("p", line, class_="facts") for line in words)
