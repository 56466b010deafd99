"""A page is one file that says what a run's files say, whatever they say, and nothing of it is code."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from petune.files.lock import RunLock
from petune.recipe import load_recipe
from petune.report.files import RunFiles
from petune.report.page import policy, report, write_report
from tests.made_runs import LABELS, Parsed, evaluation, setup, step_records, summary, write_json, write_run

HOSTILE = '</script></title><img src=x onerror="alert(1)">\'"><svg onload=alert(2)>&lt;\u202e'


def page_of(*folders: Path) -> str:
    return report([RunFiles(folder) for folder in folders])


def parsed(*folders: Path) -> Parsed:
    return Parsed(page_of(*folders))


def test_a_page_holds_everything_and_asks_for_nothing(tmp_path: Path) -> None:
    write_report([RunFiles(write_run(tmp_path / "run"))], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Parsed(text)
    assert page.unclosed == [] and text.startswith("<!doctype html>")
    assert not re.search(r"https?://|url\(|@import|<link|\bsrc=", text)
    for said in (
        "run finished",
        "0.5000 → 0.9000",
        "a head alone reaches accuracy 0.7000",
        "1 min 15 s",
        "60",
    ):
        assert said in page.text
    for title in ("Curves", "Evaluation", "Data", "What was asked", "Memory", "Environment", "Commands"):
        assert title in page.text
    assert "Warnings" not in page.text and "cannot be shown" not in page.text


def test_what_was_chosen_is_told_apart_from_what_was_left_as_it_is(tmp_path: Path) -> None:
    recipe = load_recipe({"model": "m", "data": "d", "method": "lora"}, {"method.r": 4})
    text = parsed(write_run(tmp_path / "run", settings=recipe.resolved())).text
    chosen = text[text.index("that are not the default") : text.index("defaults included")]
    assert "method.r 4" in chosen and "model m" in chosen
    assert "epochs" not in chosen and "dropout" not in chosen
    odd = write_run(tmp_path / "odd", settings={"method": {"name": "of another version"}})
    assert "that are not the default" not in parsed(odd).text and "All " in parsed(odd).text


@pytest.mark.parametrize(
    "told", ["[]", '{"ranks": 3}', '{"at": "x", "ranks": [{"rank": "1"}, 7, {"rank": 1}]}']
)
def test_a_run_in_progress_shows_how_its_ranks_are_as_far_as_that_is_known(told: str, tmp_path: Path) -> None:
    ranks = [{"blocks": "decoder 0-3"}, {"blocks": "decoder 4-7"}]
    facts = {"plan": {"words": "pp 2", "world": 2, "ranks": ranks}}
    folder = write_run(tmp_path / "run", finished=False, facts=facts)
    heard = [
        {"rank": 0, "age_s": 0.0, "step": 2, "work": [0.5, 3 << 30, "cuda:0"]},
        {"rank": 1, "age_s": 42.0, "step": 1, "work": None},
    ]
    write_json(folder / "ranks.json", {"at": time.time(), "ranks": heard})
    with RunLock(folder):
        text = parsed(folder).text
        assert re.search(r"cuda:0 3 .* 4[2-9] s ago", text[text.index("Parallel plan") :]), text
        (folder / "ranks.json").write_text(told)
        assert "decoder 4-7" in (text := parsed(folder).text) and "cuda:0" not in text
    write_json(folder / "ranks.json", {"at": time.time(), "ranks": heard})
    assert "cuda:0" not in parsed(folder).text


def test_the_loss_of_a_task_with_several_stands_beside_its_name(tmp_path: Path) -> None:
    recipe = load_recipe({"model": "m", "data": "d", "method": "lora", "task": "prefer", "prefer": "ipo"})
    facts = {"task": "prefer"}
    run = write_run(tmp_path / "run", settings=recipe.resolved(), facts=facts, came_out=facts)
    assert "m · lora · prefer: ipo · one process" in parsed(run).text


def test_only_the_pages_own_script_may_run(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "run"))
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    said = next(found["content"] for found in Parsed(text).all("meta") if "http-equiv" in found)
    assert f"script-src 'sha256-{digest}'" in said and "connect-src 'none'" in said
    assert "connect-src 'self'" in policy(live=True)


def hostile_run(folder: Path) -> Path:
    """A run in which every text that a user, a row or a file can choose is hostile."""
    records = [evaluation(0, 0.5), *step_records(5), evaluation(5, 0.9)]
    records[2] |= {"spike": HOSTILE, HOSTILE: 1.0, f"eval_{HOSTILE}": 0.5}
    facts = setup(5)
    facts["data"] |= {"notes": [HOSTILE], "sources": [HOSTILE], "truncation": HOSTILE}
    facts["data"] |= {"classes": {HOSTILE: {HOSTILE: 3, "b": 1}}}
    facts |= dict.fromkeys(("model", "method", "task", "metric", "numbers"), HOSTILE)
    facts |= {"labels": [HOSTILE, "b"], "warnings": [HOSTILE]}
    facts["plan"] = {"words": HOSTILE, "ranks": [{"blocks": HOSTILE, "heads": HOSTILE}]}
    scores = {HOSTILE: 0.5, "loss": 1.0}
    came_out = {
        "metric": HOSTILE,
        "before": scores,
        "after": scores,
        "warnings": [HOSTILE],
        "notes": [HOSTILE],
    }
    settings = {
        "model": HOSTILE,
        "method": {"name": HOSTILE, "x": [HOSTILE]},
        HOSTILE: HOSTILE,
        "name": HOSTILE,
    }
    write_run(folder, records=records, facts=facts, came_out=came_out, settings=settings)
    for name in ("env.json", "eval.json", "forecast.json"):
        write_json(folder / name, {HOSTILE: HOSTILE, "run_id": HOSTILE})
    keys = ("prompt", "expected", "base", "tuned")
    write_json(folder / "answers.json", {"rows": [dict.fromkeys(keys, HOSTILE)]})
    (folder / "recipe.yaml").write_text(f"model: {HOSTILE}")
    (folder / "run.log").write_text(HOSTILE)
    return folder


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(3)> '\"&"
    plain = parsed(write_run(tmp_path / "plain", 5))
    folder = hostile_run(tmp_path / name)
    (tmp_path / "other").mkdir()
    for page in (parsed(folder), parsed(folder, write_run(tmp_path / "other" / name))):
        assert page.unclosed == [] and name in page.text
        assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {
            *("article", "h3", "h4", "circle", "section", "time")
        }
        assert len(page.all("script")) == 1 and not page.all("img")
        assert not [key for _, found in page.elements for key in found if key.startswith("on")]
        assert page.text.count('onerror="alert(1)"') > 20
        assert "\u202e" not in page.text and "\\u202e" in page.text


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_run_in_progress_says_how_far_it_is(state: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", 40, records=step_records(30), finished=False)
    if state == "running":
        with RunLock(folder):
            text = parsed(folder).text
        assert "step 30 of 40, about 1.0 s of steps left" in text and "--resume" in text
    else:
        (folder / "run.log").write_text("2025-06-15 line\npetune.errors.TrainingFault: loss is nan\n")
        text = parsed(folder).text
        assert (
            "stopped at step 30 (petune.errors.TrainingFault: loss is nan); go on with: petune train" in text
        )
    assert f"run {state}" in text


def test_a_run_that_has_only_begun_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "resolved.yaml").write_text("model: demo:minilm\nmethod: {name: lora}\n")
    page = parsed(folder)
    assert page.unclosed == [] and "demo:minilm · lora" in page.text and "cannot be shown" not in page.text


def test_the_page_of_a_run_that_is_ending_says_what_came_of_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    with RunLock(folder):
        page = Parsed(report([RunFiles(folder, ending=summary(40))]))
    assert "run finished" in page.text and "0.5000 → 0.9000" in page.text


def test_a_damaged_run_is_shown_with_its_damage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_text("{")
    page = parsed(folder)
    assert page.all("span", "chip damaged") and "Damaged: summary.json" in page.text and "Curves" in page.text


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, 7, "x", [], [7], {"a": 7}])
def test_no_fact_of_another_kind_breaks_the_page(value: Any, tmp_path: Path) -> None:
    """Every fact in turn is replaced; the page is made, and says where a part is missing."""
    whole = write_run(tmp_path / "whole")
    for name in ("setup.json", "summary.json", "env.json"):
        found = json.loads((whole / name).read_text())
        for key in found:
            folder = tmp_path / f"{name} {key}"
            write_run(folder, 3)
            write_json(folder / name, {k: v for k, v in found.items() if k != "seal"} | {key: value})
            assert parsed(folder).unclosed == []
    records = [
        evaluation(0, 0.5) | {"confusion": value, "spike": value},
        *step_records(3, tokens_per_s=value, lr=value),
    ]
    assert parsed(write_run(tmp_path / "records", 3, records=records)).unclosed == []


def test_one_step_is_enough(tmp_path: Path) -> None:
    page = parsed(write_run(tmp_path / "run", 1))
    assert page.unclosed == [] and page.all("circle", "line c0 faint")


def test_losses_that_are_no_number_are_said_in_words(tmp_path: Path) -> None:
    records = step_records(8)
    records[4]["loss"] = math.nan
    records[5]["grad_norm"] = math.inf
    page = parsed(write_run(tmp_path / "run", 8, records=records))
    assert "The training loss is no finite number at step 5." in page.text
    assert "The gradient norm is no finite number at step 6." in page.text
    assert not any("nan" in found["d"] for found in page.all("path"))
    everything = [record | {"loss": math.nan} for record in records]
    assert (
        "at steps 1, 2, 3, 4, 5 and 3 more" in parsed(write_run(tmp_path / "all", 8, records=everything)).text
    )


def test_the_steps_of_a_resumed_run_are_drawn_once(tmp_path: Path) -> None:
    records = [*step_records(10), *step_records(15, first=6)]
    page = parsed(write_run(tmp_path / "run", 20, records=records))
    (line,) = [found for found in page.all("path", "line c0 faint")]
    assert len(re.findall(r"[\d.]+,[\d.]+", line["d"])) == 20


def test_ten_thousand_steps_are_less_than_300_kilobytes(tmp_path: Path) -> None:
    records = [evaluation(0, 0.5), *step_records(10_000)]
    records += [evaluation(step, 0.9) for step in range(50, 10_001, 50)]
    records[7000]["loss"], records[8000]["grad_norm"] = 77.0, 0.0005
    text = page_of(write_run(tmp_path / "run", 10_000, records=records))
    assert len(text.encode()) < 300_000
    lines = [json.loads(found["data-lines"]) for found in Parsed(text).all("svg")]
    values = {name: data[1::2] for chart in lines for name, _, data in chart}
    assert max(values["loss"]) == 77.0 and min(values["gradient norm"]) == 0.0005
    three = [write_run(tmp_path / f"run{at}", 10_000, records=records) for at in range(3)]
    assert len(page_of(*three).encode()) < 600_000


def test_several_runs_of_different_tasks_are_compared(tmp_path: Path) -> None:
    first = write_run(tmp_path / "one", settings={"lr": 0.5, "seed": 3})
    scores = {"loss": 2.0, "perplexity": 7.4}
    records = [{"step": 0, "epoch": 0, "eval_loss": 2.0, "eval_perplexity": 7.4}, *step_records(9)]
    second = write_run(
        tmp_path / "two",
        9,
        records=records,
        settings={"method": {"name": "full"}},
        facts={"task": "causal", "labels": [], "metric": "loss"},
        came_out={"task": "causal", "metric": "loss", "before": scores, "after": scores, "head_only": None},
    )
    third = write_run(tmp_path / "three", finished=False)
    page = parsed(first, second, third)
    assert page.unclosed == [] and "3 runs compared" in page.text
    assert "seed 3 0 0" in page.text
    assert "lr 0.5 0.001 0.001" in page.text and "method.name lora full lora" in page.text
    assert "Perplexity, held out" in page.text and "Accuracy, held out" in page.text
    assert [len(page.all("path", f"line c{at} faint")) for at in range(3)] == [1, 1, 1]
    assert len(page.all("details", "run")) == 3


def test_methods_differ_in_what_was_chosen_of_their_own_settings(tmp_path: Path) -> None:
    folders = []
    for method in ({"name": "lora", "alpha": 3.0}, {"name": "full"}):
        settings = load_recipe({"model": "m", "data": "d", "method": method}).resolved()
        folders.append(write_run(tmp_path / str(method["name"]), settings=settings))
    text = parsed(*folders).text
    differs = text[text.index("What differs") : text.index("Curves")]
    assert "method.name lora full" in differs and "method.alpha 3 -" in differs
    assert "method.r " not in differs and "method.reduction" not in differs


def test_runs_that_are_alike_are_said_to_be(tmp_path: Path) -> None:
    page = parsed(write_run(tmp_path / "one"), write_run(tmp_path / "two"))
    assert "All settings are the same." in page.text


def test_the_confusion_is_that_of_the_state_that_is_kept(tmp_path: Path) -> None:
    records = [evaluation(0, 0.5), evaluation(10, 0.9), evaluation(20, 0.2)]
    page = parsed(write_run(tmp_path / "run", 20, records=records, came_out={"best_step": 10}))
    assert "tuned, step 10" in page.text and f"{LABELS[0]} 9 1 90.0%" in page.text
    assert len(page.all("td", "shade right")) == 4


def test_memory_and_plan_say_who_holds_what(tmp_path: Path) -> None:
    ranks = [{"blocks": "decoder 0-3", "rows": "50%"}, {"blocks": "decoder 4-7", "rows": "50%"}]
    memory = [{"frozen": 1 << 20, "tuned": 0, "optimizer": 0, "peak": size << 20} for size in (3, 5)]
    facts = {"plan": {"words": "pp 2", "world": 2, "ranks": ranks}}
    folder = write_run(tmp_path / "run", facts=facts, came_out={"memory": memory})
    predicted = {"frozen": 1 << 20, "tuned": 0, "optimizer": 0, "total": 4 << 20}
    write_json(folder / "forecast.json", {"ranks": [predicted, predicted | {"total": 1 << 20}]})
    text = parsed(folder).text
    assert "0 decoder 0-3 50% 3 MiB 1 decoder 4-7 50% 5 MiB" in text
    assert "gradients, activations and the rest 3 MiB 4 MiB in all, at the peak 4 MiB 5 MiB" in text


def test_a_model_given_in_python_has_no_command_of_the_shell(tmp_path: Path) -> None:
    page = parsed(write_run(tmp_path / "run", settings={"model": "object:LlamaForCausalLM@0123"}))
    assert "petune.load_run(" in page.text and "petune train" not in page.text


def test_a_path_with_spaces_is_quoted_in_commands(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my run; rm -rf")
    assert f"petune eval '{folder}'" in parsed(folder).text
