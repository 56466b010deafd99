"""What pyproject.toml cannot say: an editable install names the source folders in a .pth file, which mypy and
pyright read.

setuptools' own way for this layout is an import hook, which no type checker follows.
"""

from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel


class SourceFolders(editable_wheel):
    """Editable installs by folders on the path, where setuptools still has that form; else as setuptools
    does."""

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> Any:
        try:
            from setuptools.command.editable_wheel import _StaticPth
        except ImportError:
            return super()._select_strategy(name, tag, build_lib)
        root = Path(__file__).parent.resolve()
        return _StaticPth(self.distribution, name, [root, root / "cli"])


setup(cmdclass={"editable_wheel": SourceFolders})
