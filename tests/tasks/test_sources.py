from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from petune.errors import DataError, MachineError
from petune.tasks import DataConfig, load_rows
from petune.tasks.bad_rows import Faults
from petune.tasks.sources import find_source

ROWS = [("good", "a"), ("bad", "b"), ("fine, too", "a"), ("poor", "b")]


def write(path: Path) -> Path:
    """ROWS in the format of the suffix."""
    import json

    import pyarrow
    import pyarrow.parquet

    objects = [{"text": text, "label": label} for text, label in ROWS]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(objects), path)
        return path
    path.write_text(
        {
            ".jsonl": "".join(json.dumps(row) + "\n" for row in objects),
            ".json": json.dumps(objects, indent=2),
            ".csv": "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in ROWS),
            ".tsv": "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in ROWS),
            ".txt": "".join(f"{text}\n" for text, _ in ROWS),
        }[path.suffix]
    )
    return path


@pytest.mark.parametrize("suffix", ["json", "csv", "tsv", "parquet"])
def test_every_file_kind_gives_the_same_rows(suffix: str, tmp_path: Path) -> None:
    expected = load_rows(DataConfig(str(write(tmp_path / "d.jsonl"))), "classify", tmp_path)
    rows = load_rows(DataConfig(str(write(tmp_path / f"d.{suffix}"))), "classify", tmp_path)
    assert rows.sha256 == expected.sha256
    assert rows.labels == ("a", "b")


def test_a_text_file_is_a_row_per_line(tmp_path: Path) -> None:
    rows = load_rows(DataConfig(str(write(tmp_path / "d.txt"))), "causal", tmp_path)
    assert len(rows.train) + len(rows.eval) == 4


@pytest.mark.parametrize(
    ("suffix", "line"), [("jsonl", 3), ("json", 10), ("csv", 4), ("tsv", 4), ("parquet", 3)]
)
def test_each_reader_knows_the_line_of_a_row(suffix: str, line: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = find_source(str(write(tmp_path / f"d.{suffix}")), tmp_path)
    records = list(source.records("train", Faults(skip=False)))
    assert records[2].where == f"d.{suffix}:{line}"


def test_a_csv_file_between_semicolons_gives_the_same_rows(tmp_path: Path) -> None:
    expected = load_rows(DataConfig(str(write(tmp_path / "d.csv"))), "classify", tmp_path)
    (tmp_path / "s.csv").write_text("text;label\n" + "".join(f'"{text}";{label}\n' for text, label in ROWS))
    assert load_rows(DataConfig(str(tmp_path / "s.csv")), "classify", tmp_path).sha256 == expected.sha256


def test_a_quoted_csv_cell_may_span_lines_and_the_next_row_keeps_its_line(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.csv").write_text('text,label\n"two\nlines",a\nnext,b\n')
    records = list(find_source("d.csv", tmp_path).records("train", Faults(skip=False)))
    assert [record.where for record in records] == ["d.csv:2", "d.csv:4"]
    assert records[0].columns["text"] == "two\nlines"


def test_paths_start_at_the_recipe_then_at_the_working_directory(tmp_path: Path, monkeypatch) -> None:
    recipe, here = tmp_path / "recipes", tmp_path / "here"
    recipe.mkdir(), here.mkdir()
    write(here / "d.jsonl")
    monkeypatch.chdir(here)
    assert find_source("d.jsonl", recipe).train == (here / "d.jsonl",)
    write(recipe / "d.jsonl")
    assert find_source("d.jsonl", recipe).train == (recipe / "d.jsonl",)


def test_a_missing_path_is_an_error_that_lists_where_it_looked_and_the_nearest_name(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "reviews.jsonl")
    with pytest.raises(
        DataError,
        match=r"revews\.jsonl'\n   found no such file or folder in /[\s\S]*did you mean: reviews\.jsonl",
    ):
        find_source("revews.jsonl", tmp_path)


def test_a_folder_with_train_and_eval_files_brings_its_own_split(tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        write(tmp_path / f"{name}.jsonl")
    source = find_source(str(tmp_path), tmp_path)
    assert [path.name for path in (*source.train, *source.held_out)] == ["train.jsonl", "validation.jsonl"]
    assert "not read: test.jsonl" in source.notes[0]


def test_a_folder_of_other_names_and_a_glob_read_every_file_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl"), write(tmp_path / "a.csv")
    assert [path.name for path in find_source(str(tmp_path), tmp_path).train] == ["a.csv", "b.jsonl"]
    assert [path.name for path in find_source(str(tmp_path / "*.jsonl"), tmp_path).train] == ["b.jsonl"]


def test_a_local_folder_wins_over_the_hub_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    write(tmp_path / "org" / "name" / "d.jsonl")
    source = find_source("org/name", tmp_path)
    assert source.hub is None
    assert "not the hub's" in source.notes[0]


@pytest.mark.parametrize(
    ("spec", "hub"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/name:sub", ("org/name", "sub", None)),
        ("org/name@test", ("org/name", None, "test")),
        ("org/name:sub@train[:10%]", ("org/name", "sub", "train[:10%]")),
    ],
)
def test_hub_names_are_read_with_config_and_split(spec: str, hub: tuple, tmp_path: Path) -> None:
    assert find_source(spec, tmp_path).hub == hub


@pytest.mark.parametrize("spec", ["./org/name", "org/name.jsonl", "/org/name", "name"])
def test_what_looks_like_a_path_is_never_looked_for_on_the_hub(spec: str, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        find_source(spec, tmp_path)


def test_the_demo_corpus_has_rows_for_every_task(tmp_path: Path) -> None:
    sizes = {}
    for task in ("classify", "seq2seq", "causal"):
        rows = load_rows(DataConfig("demo:docstrings"), task, tmp_path)
        sizes[task] = len(rows.train)
        assert rows.eval
        assert (rows.labels == ("class", "function", "module")) == (task == "classify")
    assert sizes["classify"] == sizes["causal"] > sizes["seq2seq"], (
        "rows without a body are dropped from seq2seq alone"
    )
    assert any(
        "rows without body or summary dropped" in note
        for note in load_rows(DataConfig("demo:docstrings"), "seq2seq", tmp_path).notes
    )


def test_the_domain_corpus_is_other_text(tmp_path: Path) -> None:
    general, domain = (
        load_rows(DataConfig(f"demo:{name}"), "causal", tmp_path)
        for name in ("docstrings", "docstrings-domain")
    )
    assert not {row.text for row in general.train} & {row.text for row in domain.eval}


def test_unknown_demo_data_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="demo:docstrings, demo:docstrings-domain"):
        find_source("demo:docs", tmp_path)


def test_eval_may_name_a_source_with_held_out_rows_of_its_own(tmp_path: Path) -> None:
    rows = load_rows(DataConfig("demo:docstrings", eval="demo:docstrings-domain"), "causal", tmp_path)
    domain = load_rows(DataConfig("demo:docstrings-domain"), "causal", tmp_path)
    assert rows.eval == domain.eval
    assert any("held-out rows are demo:docstrings-domain" in note for note in rows.notes)


# --- the hub, without a network ---


@pytest.fixture
def hub(monkeypatch) -> list[tuple]:
    """A hub whose one data set has a train and a validation split; calls are recorded, and `refuse` makes it
    fail."""
    calls: list = []

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])}
    )

    def load_dataset(name: str, config: str | None, split: str | None) -> object:
        calls.append((name, config, split))
        if name == "no/network":
            raise ConnectionError("offline")
        if name == "no/such":
            raise datasets.exceptions.DatasetNotFoundError
        sides = {
            one: [{"text": f"{one} {n}", "label": n % 2} for n in range(6)]
            for one in ("train", "validation", "test")
        }
        splits = datasets.DatasetDict(
            {one: datasets.Dataset.from_list(rows, features=features) for one, rows in sides.items()}
        )
        return splits[split] if split else splits

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_a_hub_data_set_brings_its_splits_and_class_names(hub, tmp_path: Path) -> None:
    rows = load_rows(DataConfig("org/name:sub"), "classify", tmp_path)
    assert [row.text for row in rows.eval] == [f"validation {n}" for n in range(6)]
    assert rows.labels == ("a", "b")
    assert rows.train[2].where == "org/name@train:3"
    assert set(hub) == {("org/name", "sub", None)}


def test_a_named_split_is_split_here(hub, tmp_path: Path) -> None:
    rows = load_rows(DataConfig("org/name@test", split=0.5), "classify", tmp_path)
    assert {row.text.split()[0] for row in (*rows.train, *rows.eval)} == {"test"}


def test_an_unreachable_hub_is_the_environments_fault_and_points_to_the_demo(hub, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cannot reach the hub[\s\S]*demo:docstrings"):
        load_rows(DataConfig("no/network"), "classify", tmp_path)


def test_an_unknown_hub_data_set_is_a_data_error(hub, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data set 'no/such'"):
        load_rows(DataConfig("no/such"), "classify", tmp_path)


# --- what datasets has written ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with what save_to_disk writes of several splits and of one, and a Parquet file, all with class
    names."""

    folder = tmp_path_factory.mktemp("saved")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )

    def split(name: str) -> datasets.Dataset:
        return datasets.Dataset.from_list(
            [{"text": f"{name} {n}", "label": n % 2} for n in range(6)], features=features
        )

    datasets.DatasetDict({name: split(name) for name in ("train", "validation", "test")}).save_to_disk(
        folder / "several"
    )
    split("only").save_to_disk(folder / "one")
    datasets.DatasetDict({"test": split("test")}).save_to_disk(folder / "no_train")
    split("file").to_parquet(folder / "d.parquet")
    return folder


def test_splits_saved_to_disk_are_used_as_such_with_the_names_of_their_classes(saved: Path) -> None:
    rows = load_rows(DataConfig("several"), "classify", saved)
    assert [row.text for row in rows.train] == [f"train {n}" for n in range(6)]
    assert [row.text for row in rows.eval] == [f"validation {n}" for n in range(6)]
    assert rows.labels == ("neg", "pos")
    assert rows.train[2].where.endswith("several/train:3")
    assert "rows per class, to train on + held out: neg 3 + 3, pos 3 + 3" in rows.notes


@pytest.mark.parametrize("name", ["one", "d.parquet"])
def test_a_single_split_and_a_parquet_file_have_the_names_of_their_classes(name: str, saved: Path) -> None:
    rows = load_rows(DataConfig(name), "classify", saved)
    assert rows.labels == ("neg", "pos")
    assert len(rows.train) + len(rows.eval) == 6


def test_a_saved_data_set_without_train_split_or_damaged_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train split[\s\S]*found test"):
        load_rows(DataConfig("no_train"), "classify", saved)
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(DataError, match="not a whole data set saved by datasets"):
        load_rows(DataConfig(str(tmp_path)), "classify", tmp_path)


def test_only_data_files_of_a_like_name_are_offered_for_a_missing_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broke.cases").write_text(""), write(Path("broke.csv")), Path("nope.py").write_text("")
    with pytest.raises(DataError) as caught:
        find_source("./nope.csv", tmp_path)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("target", ["rows.jsonl", "gone.jsonl"])
def test_a_link_that_leads_nowhere_is_named(target: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to(target)
    with pytest.raises(DataError, match=rf"link that leads nowhere\s+found a link to {target}"):
        find_source("rows.jsonl", tmp_path)
