"""No file from outside ever runs: every verb, over folders full of code, pickles, templates and archives,
under an audit hook.

The verbs run in a forked process whose hook notes, and forbids, running or compiling a foreign file,
unpickling, starting a process, reaching for the network, and writing anywhere but the run's folder, petune's
cache and temporary files of the system.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
from petune_cli.main import app

from petune.files.atomic import commit_folder
from tests.small_runs import as_yaml, run, settings, write_model, write_rows

FORK = multiprocessing.get_context("fork")
PAYLOAD = "open({!r}, 'w').write('fired')"
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn"}
REACHES = {
    "socket.connect",
    "socket.bind",
    "socket.getaddrinfo",
    "socket.sendto",
    "urllib.Request",
    "http.client.connect",
}
CHANGES = {
    "os.mkdir": 0,
    "os.rename": 1,
    "os.remove": 0,
    "os.rmdir": 0,
    "os.link": 1,
    "os.symlink": 1,
    "os.truncate": 0,
    "os.chmod": 0,
}


# ---------------------------------------------------------------- the guard


def guard(foreign: Path, allowed: list[Path], seen: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook: what may not happen is noted in `seen` and raises."""

    def inside(path: Any) -> bool:
        real = os.path.realpath(os.fsdecode(path))
        return any(real == str(place) or real.startswith(f"{place}/") for place in allowed)

    def forbid(what: str) -> None:
        seen.append(what)
        raise PermissionError(what)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS or event in REACHES:
            forbid(f"{event} {arguments!r}"[:300])
        elif event == "pickle.find_class":
            forbid(f"unpickles {arguments!r}"[:300])
        elif event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(str(foreign)):
            forbid(f"runs {arguments[0].co_filename}")
        elif event == "compile" and (str(foreign) in str(arguments[1]) or "fired" in _text(arguments[0])):
            forbid(f"compiles {arguments[1]}")
        elif event == "open" and arguments[0] is not None and not isinstance(arguments[0], int):
            writes = isinstance(arguments[2], int) and arguments[2] & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            )
            if writes and not inside(arguments[0]):
                forbid(f"writes {arguments[0]!r}")
        elif (
            event in CHANGES
            and not isinstance(arguments[CHANGES[event]], int)
            and not inside(arguments[CHANGES[event]])
        ):
            forbid(f"{event} {arguments!r}"[:300])

    return hook


def _text(source: Any) -> str:
    return (
        source.decode(errors="replace")
        if isinstance(source, bytes)
        else source
        if isinstance(source, str)
        else ""
    )


def watched(
    commands: list[tuple[str, ...]], foreign: Path, place: Path
) -> tuple[list[tuple[int, str]], list[str]]:
    """(exit code and what was printed) of each command line, run in `place` under the guard, and what the
    guard saw."""
    mine, theirs = FORK.Pipe()

    def child() -> None:
        os.chdir(place)
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        seen: list[str] = []
        allowed = [
            place / "out",
            place / "cache",
            Path(tempfile.gettempdir()).resolve() / "torchinductor",
            Path("/dev"),
        ]
        sys.addaudithook(guard(foreign, allowed, seen))
        found = []
        for words in commands:
            shown = io.StringIO()
            code = 0
            with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
                try:
                    app(list(words))
                except SystemExit as ended:
                    code = int(ended.code or 0)
            found.append((code, shown.getvalue()))
        theirs.send((found, seen))
        os._exit(0)

    process = FORK.Process(target=child, daemon=True)
    process.start()
    theirs.close()
    try:
        return mine.recv()  # type: ignore[no-any-return]
    finally:
        process.join(5)
        process.kill()


def test_the_guard_sees_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("x = 1")
    seen: list[str] = []
    hook = guard(tmp_path, [tmp_path / "out"], seen)
    code = compile("x = 1", str(tmp_path / "evil.py"), "exec")
    events: list[tuple[str, tuple[Any, ...]]] = [
        ("exec", (code,)),
        ("compile", (b"fired", "x")),
        ("pickle.find_class", ("os", "system")),
        ("subprocess.Popen", ("ls", [], None, None)),
        ("os.system", (b"ls",)),
        ("socket.connect", (None, ("example.org", 80))),
        ("open", (str(tmp_path / "x"), "w", os.O_WRONLY | os.O_CREAT)),
        ("open", (str(tmp_path / "out" / ".." / "x"), "w", os.O_WRONLY)),
        ("os.mkdir", (str(tmp_path / "new"), 0o777, -1)),
        ("os.rename", (str(tmp_path / "out" / "a"), str(tmp_path / "b"), -1, -1)),
    ]
    for event, arguments in events:
        with pytest.raises(PermissionError):
            hook(event, arguments)
    assert len(seen) == len(events)
    hook("open", (str(tmp_path / "x"), "r", os.O_RDONLY))
    hook("open", (str(tmp_path / "out" / "x"), "w", os.O_WRONLY))
    hook("exec", (compile("x = 1", "<string>", "exec"),))


def test_unpickling_beneath_petune_is_noticed_in_every_test(unpickled: list[str], tmp_path: Path) -> None:
    pickled = ForkingPickler.dumps(Path)
    ForkingPickler.loads(pickled)
    assert unpickled == []
    commit_folder(tmp_path / "new", lambda work: ForkingPickler.loads(pickled), False, ())
    assert len(unpickled) == 1 and "pathlib" in unpickled[0] and "atomic.py" in unpickled[0]
    unpickled.clear()


# ---------------------------------------------------------------- the folders


class Shot:
    """A pickle that writes a file when it is read."""

    def __init__(self, fired: Path) -> None:
        self.fired = fired

    def pickled(self) -> bytes:
        """By hand, as the house has no pickle: builtins.exec(PAYLOAD)."""
        text = PAYLOAD.format(str(self.fired)).encode()
        return (
            b"\x80\x02c__builtin__\nexec\nq\x00X"
            + len(text).to_bytes(4, "little")
            + text
            + b"q\x01\x85q\x02Rq\x03."
        )


def code(folder: Path, shot: Shot) -> None:
    """A class of its own, by auto_map."""
    (folder / "evil.py").write_text(
        PAYLOAD.format(str(shot.fired)) + "\nclass Config: ...\nclass Model: ...\nclass Tokenizer: ...\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))


def tokenizer_code(folder: Path, shot: Shot) -> None:
    """A tokenizer of its own, by auto_map, under a model that transformers knows."""
    (folder / "evil.py").write_text(PAYLOAD.format(str(shot.fired)) + "\nclass Tokenizer: ...\n")
    found = json.loads((folder / "tokenizer_config.json").read_text())
    found |= {
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]},
        "tokenizer_class": "EvilTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(found))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil"}))


def both_known_and_code(folder: Path, shot: Shot) -> None:
    """Code beside a class that transformers has itself, which is used."""
    code(folder, shot)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    found = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(found | {"auto_map": {"AutoTokenizer": [None, "evil.Tokenizer"]}})
    )
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(PAYLOAD.format(str(shot.fired)))


def kernels(folder: Path, shot: Shot) -> None:
    """An attention that would be fetched from the hub."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "somebody/kernel"}))


def pickles(folder: Path, shot: Shot) -> None:
    """Every kind of pickle in the place of weights."""
    (folder / "model.safetensors").unlink()
    for name in (
        "pytorch_model.bin",
        "model.pt",
        "model.pkl",
        "model.npy",
        ".metadata",
        "training_args.bin",
        "consolidated.pth",
    ):
        (folder / name).write_bytes(shot.pickled())


def named_pickle(folder: Path, shot: Shot) -> None:
    """config.json names a .bin file."""
    pickles(folder, shot)
    (folder / "adapter_model.bin").write_bytes(shot.pickled())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "adapter_model.bin"}))


def renamed_pickle(folder: Path, shot: Shot) -> None:
    """A pickle with the name of tensors."""
    (folder / "model.safetensors").write_bytes(shot.pickled())


def renamed_zip(folder: Path, shot: Shot) -> None:
    """A zip archive as torch.save writes it, with the name of tensors."""
    with zipfile.ZipFile(folder / "model.safetensors", "w") as archive:
        archive.writestr("archive/data.pkl", shot.pickled())
        archive.writestr("../../escaped", "x")


def renamed_tar(folder: Path, shot: Shot) -> None:
    """A tar archive with paths that lead out, with the name of tensors."""
    with tarfile.open(folder / "model.safetensors", "w:gz") as archive:
        entry = tarfile.TarInfo("../../escaped")
        archive.addfile(entry, io.BytesIO())


def adapter_inside(folder: Path, shot: Shot) -> None:
    """An adapter beside the model, which transformers would load with peft."""
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder), "r": 8})
    )
    (folder / "adapter_model.bin").write_bytes(shot.pickled())


FOLDERS: dict[str, tuple[Callable[[Path, Shot], None], int]] = {
    "code": (code, 4),
    "code of a tokenizer": (tokenizer_code, 4),
    "code beside a known class": (both_known_and_code, 0),
    "kernels": (kernels, 4),
    "pickles": (pickles, 4),
    "a pickle that is named": (named_pickle, 4),
    "a renamed pickle": (renamed_pickle, 4),
    "a renamed zip": (renamed_zip, 4),
    "a renamed tar": (renamed_tar, 4),
    "an adapter inside": (adapter_inside, 4),
}
# one of each kind in the short suite: code, pickles by name and by content, what hides in another file
SHORT = (
    "code beside a known class",
    "kernels",
    "a pickle that is named",
    "a renamed zip",
    "an adapter inside",
)
READS_NO_WEIGHTS = {"check", "plan", "data", "init"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base `llama`, its rows, a recipe r.yaml and a finished run `run`."""
    place = tmp_path_factory.mktemp("canaries").resolve()
    recipe = settings(place, max_steps=1, warmup=0)
    run(recipe)
    as_yaml(place / "r.yaml", {**recipe, "out": str(place / "out" / "run")})
    (place / "out").mkdir()
    return place


def verbs_on_model(model: Path, place: Path) -> list[tuple[str, ...]]:
    """Every verb that takes a recipe, on a recipe with this model."""
    setting = f"model={model}"
    return [
        ("check", "r.yaml", setting),
        ("plan", "r.yaml", setting),
        ("data", "r.yaml", setting),
        ("init", setting, f"data={place / 'causal.jsonl'}", "out/new.yaml"),
        ("profile", "r.yaml", setting, "--steps", "1"),
        ("bench", "r.yaml", setting, "--steps", "1"),
        ("train", "r.yaml", setting, "--overwrite"),
    ]


@pytest.mark.forks
@pytest.mark.parametrize(
    "verbs", [("check", "train"), pytest.param((), marks=pytest.mark.long)], ids=["some", "all"]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in FOLDERS]
)
def test_no_verb_runs_anything_of_a_models_folder(
    name: str, verbs: tuple[str, ...], place: Path, tmp_path: Path
) -> None:
    make, expected = FOLDERS[name]
    fired, folder = tmp_path / "fired", tmp_path / "model"
    shutil.copytree(place / "llama", folder)
    make(folder, Shot(fired))
    commands = [words for words in verbs_on_model(folder, place) if words[0] in verbs or not verbs]
    found = nothing_fires(commands, tmp_path, place)
    for words, (status, text) in zip(commands, found, strict=True):
        assert status == expected or (words[0] in READS_NO_WEIGHTS and status == 0), (
            f"{words[0]}: {status}\n{text}"
        )
    if name in ("code", "code of a tokenizer"):
        assert "never does" in found[-1][1] and "auto_map" in found[-1][1] and "evil.py" in found[-1][1]


def nothing_fires(commands: list[tuple[str, ...]], foreign: Path, place: Path) -> list[tuple[int, str]]:
    """Exit code and output of each command, none of which ran, fetched or wrote anything it may not, nor
    asked, nor broke."""
    shutil.rmtree(place / "out", ignore_errors=True)
    (place / "out").mkdir()
    found, seen = watched(commands, foreign, place)
    assert seen == []
    assert not (foreign / "fired").exists()
    for words, (status, text) in zip(commands, found, strict=True):
        assert status != 1, f"{words}: {text}"
        assert "[y/N]" not in text and "Traceback" not in text, f"{words}: {text}"
    return found


# ---------------------------------------------------------------- adapters, runs, recipes, data


@pytest.mark.forks
def test_no_verb_runs_anything_of_an_adapter(place: Path, tmp_path: Path) -> None:
    shot = Shot(tmp_path / "fired")
    for name in ("bin", "renamed", "code"):
        shutil.copytree(place / "run" / "tuned", tmp_path / name)
        for ours in ("petune.json", "petune.manifest.json"):
            (tmp_path / name / ours).unlink()
    tensors = "adapter_model.safetensors"
    (tmp_path / "bin" / tensors).unlink()
    (tmp_path / "bin" / "adapter_model.bin").write_bytes(shot.pickled())
    (tmp_path / "renamed" / tensors).write_bytes(shot.pickled())
    config = json.loads((tmp_path / "code" / "adapter_config.json").read_text())
    mapping = {"base_model_class": "Model", "parent_library": "evil"}
    (tmp_path / "code" / "adapter_config.json").write_text(
        json.dumps(config | {"auto_mapping": mapping, "runtime_config": {"x": "evil"}})
    )
    (tmp_path / "code" / "evil.py").write_text(PAYLOAD.format(str(shot.fired)))
    commands = [
        ("train", "r.yaml", f"init_adapter={tmp_path / name}", "--overwrite")
        for name in ("bin", "renamed", "code")
    ]
    assert [status for status, _ in nothing_fires(commands, tmp_path, place)] == [4, 4, 0]


@pytest.mark.forks
def test_no_verb_runs_anything_of_a_run_folder(place: Path, tmp_path: Path) -> None:
    shot = Shot(tmp_path / "fired")
    folder = tmp_path / "run"
    shutil.copytree(place / "run", folder)
    (folder / "tuned" / "evil.py").write_text(PAYLOAD.format(str(shot.fired)))
    for name in (
        "tuned/adapter_model.bin",
        "tuned/tokenizer.pkl",
        "checkpoints/step-9.pt",
        "summary.pkl",
        "sitecustomize.py",
    ):
        (folder / name).write_bytes(
            shot.pickled() if not name.endswith(".py") else PAYLOAD.format(str(shot.fired)).encode()
        )
    ours = place / "out" / "ours"
    commands = [
        ("generate", str(folder), "red sun", "--max-new-tokens", "1"),
        ("merge", str(folder), "--out", str(ours / "merged")),
        ("export", str(folder), "--to", "peft", "--out", str(ours / "peft")),
        ("train", str(folder / "checkpoints"), "--resume"),
        ("eval", str(folder / "tuned")),
        ("generate", str(tmp_path), "red sun"),
        ("merge", str(folder / "checkpoints")),
    ]
    assert [status for status, _ in nothing_fires(commands, tmp_path, place)] == [0, 0, 0, 4, 4, 4, 4]
    for name in ("tuned/adapter_model.safetensors", "tuned/tokenizer.json"):
        (folder / name).write_bytes(shot.pickled())
    (folder / "summary.json").write_bytes(shot.pickled())
    assert [status for status, _ in nothing_fires(commands[:2], tmp_path, place)] == [4, 4]


RECIPES = {
    "a class in the place of a method": "method: os.system",
    "a tag of Python's": "method: !!python/object/apply:os.system ['touch fired']",
    "a component": "method: {_component_: os.system, command: touch fired}",
    "a target": "method: {_target_: builtins.exec}",
    "a class in the place of a task": "task: builtins.exec",
    "an optimizer by its path": "optimizer: torch.optim.AdamW",
    "a tracker by its path": "trackers: [os.system]",
    "a callback by its path": "callbacks: [os.system]",
    "a template that reaches out": (
        "data: {chat_template: \"{{ ''.__class__.__mro__[1].__subclasses__() }}\"}"
    ),
}


@pytest.mark.forks
def test_a_recipe_that_names_a_class_is_refused(place: Path, tmp_path: Path) -> None:
    commands = []
    for number, line in enumerate(RECIPES.values()):
        key = line.partition(":")[0]
        lines = [
            kept for kept in (place / "r.yaml").read_text().splitlines() if not kept.startswith(f"{key}:")
        ]
        (tmp_path / f"{number}.yaml").write_text("\n".join([*lines, line]) + "\n")
        commands.append(("check", str(tmp_path / f"{number}.yaml")))
    assert {status for status, _ in nothing_fires(commands, tmp_path, place)} == {2}


@pytest.mark.forks
def test_no_data_runs(place: Path, tmp_path: Path) -> None:
    shot = Shot(tmp_path / "fired")
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text(PAYLOAD.format(str(shot.fired)))
    (tmp_path / "scripted" / "train.pkl").write_bytes(shot.pickled())
    for name in ("rows.pkl", "rows.npy", "rows.pt", "rows.jsonl", "rows.parquet", "rows.json", "rows.csv"):
        (tmp_path / name).write_bytes(shot.pickled())
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        archive.writestr("../../escaped.jsonl", "{}")
    names = ["scripted", *(path.name for path in sorted(tmp_path.glob("rows.*")))]
    commands = [("data", "r.yaml", f"data={tmp_path / name}") for name in names]
    assert {status for status, _ in nothing_fires(commands, tmp_path, place)} == {3}


@pytest.mark.forks
def test_a_chat_template_cannot_reach_out_of_its_sandbox(place: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "talk.jsonl", "chat")
    templates = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch x') }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum.__globals__ }}",
        "{% for m in messages %}{{ m.update({'content': 1}) }}{% endfor %}",
    )
    commands = []
    for number, template in enumerate(templates):
        folder = write_model(tmp_path / f"model-{number}", "llama")
        (folder / "chat_template.jinja").write_text(template)
        commands.append(("data", "r.yaml", f"model={folder}", f"data={tmp_path / 'talk.jsonl'}", "task=chat"))
    statuses = [status for status, _ in nothing_fires(commands, tmp_path, place)]
    assert all(status in (2, 3, 4) for status in statuses), statuses
