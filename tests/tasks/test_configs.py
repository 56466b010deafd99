from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from petune.tasks.configs import FORMATS, ROLES, DataConfig
from petune.tasks.formats import MAY, NEEDS, TASK_FORMATS, USUAL
from petune.tasks.registry import TASKS

DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def test_every_format_is_documented() -> None:
    text = DOCS.read_text()
    for name in FORMATS:
        assert f"| `{name}` |" in text


def test_the_tables_speak_of_the_same_formats_roles_and_tasks() -> None:
    assert set(NEEDS) == set(FORMATS)
    assert (
        set(USUAL)
        == set(ROLES)
        == {role for table in (NEEDS, MAY) for roles in table.values() for role in roles}
    )
    assert set(TASK_FORMATS) == set(TASKS)


def test_defaults_keep_their_own_ranges() -> None:
    config = DataConfig("x")
    for field in fields(config):
        value = getattr(config, field.name)
        if choices := field.metadata.get("choices"):
            assert value in choices
