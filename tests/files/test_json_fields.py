"""Every single-field change of every JSON file of petune's and of peft's is refused by file and field, or
changes nothing.

Each file is sealed again after the change, where it has a seal: hashes would find all of these by themselves,
and whoever edits a file can compute them. What is promised is an error with exit code 4 (2 for a recipe),
never another exception, and never another result in silence.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import petune
from petune.errors import FileError, PetuneError
from petune.files.json_fields import (
    Digest,
    Fields,
    IntegerValue,
    MapOf,
    Number,
    OneOf,
    TextValue,
    Truth,
    TupleValue,
    check_fields,
    check_version,
    sealed,
)
from petune.files.manifest import MANIFEST, seal_folder
from petune.run.evaluate import shortcomings
from petune.run.finished import load_run
from petune.run.loop import Loop
from petune.saving import checkpoint
from tests.small_runs import loop, newest, run, settings

ABSENT = object()
VALUES: dict[str, Any] = {
    "deleted": ABSENT,
    "null": None,
    "negative": -1,
    "huge": 10**40,
    "huge float": 1e308,
    "NaN": float("nan"),
    "text": "\x1b[31mx",
    "truth": True,
    "list": [[]],
    "object": {"a": {"b": None}},
}
IDS = torch.tensor([[5, 6, 7, 8, 2]])


def places(value: Any, under: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field, the first three of long inner objects and the first item of lists."""
    keys: list[Any] = (
        [*value] if isinstance(value, dict) else [0] if isinstance(value, list) and value else []
    )
    for key in keys[:3] if under and len(keys) > 20 else keys:
        yield (*under, key)
        yield from places(value[key], (*under, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of `value` with `new` at `path`."""
    made = copy.deepcopy(value)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if new is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return made


def changes(value: Any, every: int = 1) -> Iterator[tuple[str, Any]]:
    """(what was done, the changed value), one of `every` in the short run."""
    found = [(path, name) for path in places(value) for name in VALUES]
    for path, name in found[:: every if len(found) > 150 else 1]:
        if (made := changed(value, path, VALUES[name])) != value:
            yield f"{'.'.join(map(str, path))} {name}", made


def assert_refused_or_equal(what: str, read: Callable[[], Any], expected: Any, file: str) -> bool:
    """Read a changed file; whether it was refused, by its name and with the code of a file."""
    try:
        found = read()
    except PetuneError as error:
        assert error.code == 4, f"{what}: {error!r}"
        assert file in str(error), f"{what}: {error}"
        return True
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert same(found, expected), f"{what}: read in silence, as something else"
    return False


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, tuple):
        return all(map(same, one, two))
    return bool(one == two)


# a number that takes turns with the ten VALUES
EVERY = pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base `bert` and a finished lora run `run` of a classifier with two checkpoints, exported to
    `run/peft`."""
    place = tmp_path_factory.mktemp("fields")
    run(settings(place, "bert", "lora", max_steps=2, warmup=0)).export("peft")
    return place


@pytest.fixture(scope="module")
def base(place: Path) -> nn.Module:
    model = transformers.BertForSequenceClassification.from_pretrained(
        place / "bert", num_labels=labels(place)
    )
    return model.eval()


def labels(place: Path) -> int:
    return int(load_run(place / "run").summary["num_labels"])


def logits(base: nn.Module, folder: Path) -> Tensor:
    model = petune.load(copy.deepcopy(base), folder).eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits  # type: ignore[no-any-return]


@EVERY
@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("tuned", "petune.json"),
        ("tuned", "adapter_config.json"),
        ("peft", "adapter_config.json"),
        ("tuned", MANIFEST),
        ("peft", MANIFEST),
    ],
)
def test_a_changed_field_of_a_tuned_folder_is_refused_or_changes_nothing(
    folder: str, file: str, every: int, place: Path, base: nn.Module, tmp_path: Path
) -> None:
    shutil.copytree(place / "run" / folder, tmp_path / folder)
    expected, whole = logits(base, tmp_path / folder), json.loads((tmp_path / folder / file).read_text())
    refused = []
    for what, value in changes(whole, every):
        if what == "use_rslora truth":
            continue  # a good config of another adapter
        (tmp_path / folder / file).write_text(json.dumps(value))
        if file != MANIFEST:
            seal_folder(tmp_path / folder)
        refused.append(
            assert_refused_or_equal(what, lambda: logits(base, tmp_path / folder), expected, folder)
        )
    assert sum(refused) > len(refused) / 3
    assert len(refused) >= 80 / every


@pytest.fixture(scope="module")
def resumed(place: Path) -> Loop:
    return loop(settings(place, "bert", "lora", max_steps=2, warmup=0))


# Sealed numbers of a report: another number in the place of one is seen by nobody.
REPORTED = ("tokens", "seconds", "before", "head_only", "first_loss", "last_loss", "scores", "best_scores")


def restored(made: Loop, path: Path) -> Any:
    """What resuming from a checkpoint gives: the progress that decides anything, what is tuned, the
    optimizer's options and moments."""
    made.saver.restore(path, ())
    steering = {key: value for key, value in vars(made.progress).items() if key not in REPORTED}
    moments = [value for state in made.step.optimizer.state.values() for value in state.values()]
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in made.step.optimizer.param_groups
    ]
    return (
        repr(steering),
        tuple(value.detach().clone() for value in made.step.tuned.values()),
        tuple(moments),
        repr(options),
    )


def seal_checkpoint(path: Path, manifest: dict[str, Any]) -> None:
    manifest = {key: value for key, value in manifest.items() if key != "seal"}
    text = json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"
    whole = {**manifest, "seal": hashlib.sha256(text).hexdigest()}
    (path / "manifest.json").write_bytes(json.dumps(whole, indent=1, sort_keys=True).encode() + b"\n")


@EVERY
@pytest.mark.parametrize("file", ["manifest.json", "state.json"])
def test_a_changed_field_of_a_checkpoint_is_refused_or_changes_nothing(
    file: str, every: int, place: Path, resumed: Loop, tmp_path: Path
) -> None:
    path = tmp_path / "step-2"
    shutil.copytree(newest(place / "run"), path)
    whole, manifest = (json.loads((path / name).read_text()) for name in (file, "manifest.json"))
    seal = whole.pop("seal", None)
    expected, refused = restored(resumed, path), []
    for what, value in changes(whole, every):
        if file == "state.json":
            text = json.dumps(value).encode()
            (path / file).write_bytes(text)
            changed_files = manifest["files"] | {file: manifest["files"][file] | entry_of(text)}
            seal_checkpoint(path, manifest | {"files": changed_files})
        else:
            (path / file).write_text(json.dumps(value | {"seal": seal}))
            with pytest.raises(FileError, match="manifest"):
                checkpoint.verify(path)
            seal_checkpoint(path, value)
        if what.split()[0] == "run_id" and isinstance(value.get("run_id"), str):
            continue  # which run it is decides no number; two runs in one folder are told apart elsewhere
        refused.append(assert_refused_or_equal(what, lambda: restored(resumed, path), expected, "step-2"))
    assert sum(refused) > len(refused) / 3
    assert len(refused) >= 80 / every


def entry_of(content: bytes) -> dict[str, Any]:
    """Size and hash of a file as the manifest's writer sees them."""
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"step": 99}, r"progress\.step  contradicts the manifest's step"),
        ({"step": 1}, r"progress\.step  contradicts the manifest's step"),
        ({"best_step": 3}, r"progress\.best_step  is beyond the step"),
        ({"scored_step": 3}, r"progress\.scored_step  is beyond the step"),
        ({"worse": 3}, r"progress\.worse  is beyond the step"),
        ({"stranger": 3}, r"progress\.stranger  does not fit"),
    ],
)
def test_a_sealed_progress_that_contradicts_itself_is_refused(
    change: dict[str, Any], says: str, place: Path, resumed: Loop, tmp_path: Path
) -> None:
    path = tmp_path / "step-2"
    shutil.copytree(newest(place / "run"), path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["facts"]["progress"] |= change
    seal_checkpoint(path, manifest)
    with pytest.raises(FileError, match=says):
        resumed.saver.restore(path, ())


def test_a_sealed_checkpoint_beyond_the_end_of_the_run_is_refused(
    place: Path, resumed: Loop, tmp_path: Path
) -> None:
    path = tmp_path / "step-99"
    shutil.copytree(newest(place / "run"), path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["step"] = manifest["facts"]["progress"]["step"] = 99
    seal_checkpoint(path, manifest)
    checkpoint.verify(path)
    with pytest.raises(FileError, match=r"is beyond the end of the run[\s\S]*at most 2, found 99"):
        resumed.saver.restore(path, ())


@EVERY
def test_a_changed_field_of_the_summary_is_refused_or_changes_nothing(
    every: int, place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "run", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    file = tmp_path / "run" / "summary.json"
    whole = json.loads(file.read_text())
    expected = {key: value for key, value in whole.items() if key != "seal"}

    def read() -> dict[str, Any]:
        return {key: value for key, value in load_run(tmp_path / "run").summary.items() if key != "seal"}

    refused = []
    for what, value in changes(whole, every):
        file.write_text(json.dumps(value))
        refused.append(assert_refused_or_equal(what, read, expected, "summary.json"))
        if "NaN" not in what:
            file.write_text(json.dumps(sealed({key: item for key, item in value.items() if key != "seal"})))
        try:
            found = load_run(tmp_path / "run")
            shortcomings(found.summary)
            found._repr_html_()
        except FileError:
            continue
    assert sum(refused) >= len(refused) - 1  # without the seal it is as one of the first release


@EVERY
def test_a_changed_setting_of_a_run_is_a_recipe_that_is_wrong_or_another(
    every: int, place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "run", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    file = tmp_path / "run" / "resolved.yaml"
    whole = load_run(tmp_path / "run").recipe.resolved()
    for what, value in changes(json.loads(json.dumps(whole, default=str)), every):
        file.write_text(json.dumps(value).replace("NaN", ".nan"))
        try:
            load_run(tmp_path / "run")
        except PetuneError as error:
            assert error.code in (2, 4), what
            assert "resolved.yaml" in str(error), f"{what}: {error}"


def test_lines_of_metrics_that_are_no_records_are_left_out(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "run", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    file = tmp_path / "run" / "metrics.jsonl"
    whole = load_run(tmp_path / "run").history
    with file.open("ab") as lines:
        lines.write(b'[]\n3\n{"loss": 1}\n{"step": "x"}\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"step": 3, "lo')
    assert load_run(tmp_path / "run").history == whole


# ---------------------------------------------------------------- the tables themselves


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (IntegerValue(1, 3), [1, 3], [0, 4, True, 1.0, "1", None]),
        (Number(0, 1), [0, 0.5, 1], [-0.1, 1.1, float("nan"), True, "0"]),
        (Truth(), [True, False], [0, 1, None, "true"]),
        (TextValue(("a", "b")), ["a"], ["c", None, 1, ["a"]]),
        (Digest(), ["0" * 64], ["0" * 63, "G" * 64, None]),
        (MapOf(IntegerValue(), numbered=True), [{}, {"1": 1, "0": 0}], [{"1": 1}, {"a": 1}, [], {"0": "x"}]),
        (TupleValue(IntegerValue(), TextValue()), [[1, "a"]], [[1], [1, "a", 2], ["a", 1], {}]),
        (OneOf(IntegerValue(), None), [1, None], ["a", {}, -1]),
        (
            Fields({"a": IntegerValue()}, {"b": TextValue()}),
            [{"a": 1}, {"a": 1, "b": ""}],
            [{}, {"a": 1, "c": 1}, {"a": 1, "b": 2}, []],
        ),
    ],
)
def test_a_kind_takes_what_it_says(kind: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert not list(kind.faults(value)), value
    for value in bad:
        assert list(kind.faults(value)), value
        with pytest.raises(FileError, match=r"x\.json  "):
            check_fields({"here": value}, {"here": kind}, Path("x.json"))


def test_a_newer_version_is_named_as_such_and_any_other_as_damage() -> None:
    check_version({"v": 2}, "v", 2, Path("x.json"))
    with pytest.raises(
        FileError, match=r"x\.json  v  was written by a newer petune[\s\S]*expected 2, found 3"
    ):
        check_version({"v": 3}, "v", 2, Path("x.json"))
    for wrong in ({}, {"v": 1}, {"v": 0}, {"v": True}, {"v": "2"}, {"v": None}, {"v": -1}):
        with pytest.raises(FileError, match="another version"):
            check_version(wrong, "v", 2, Path("x.json"))


def test_the_first_ten_faults_are_named_by_their_path() -> None:
    with pytest.raises(FileError) as caught:
        check_fields({"a": {str(at): "x" for at in range(30)}}, {"a": MapOf(IntegerValue())}, Path("x.json"))
    assert len(caught.value.problems) == 10
    assert "x.json  a.0  does not fit" in str(caught.value)
