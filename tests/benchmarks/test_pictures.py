from __future__ import annotations

import xml.etree.ElementTree as ET

from benchmarks.pictures import FOLDER, pictures


def test_the_pictures_of_the_documents_are_what_the_code_draws() -> None:
    made = pictures()
    assert made.keys() == {file.name for file in FOLDER.iterdir()}
    for name, text in made.items():
        ET.fromstring(text)  # well-formed
        assert (FOLDER / name).read_text(encoding="utf-8") == text, "python -m benchmarks.pictures"
    assert all(f"{size} KiB" in made["memory.svg"] for size in (92, 36, 16, 8))
