"""Copies the operator allow-list, which executor and plugin share, into the package while building it."""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

ALLOW_LIST = pathlib.Path(__file__).resolve().parent.parent / "include" / "slice" / "allowed_operators.txt"


class BuildWithAllowList(build_py):
    def run(self):
        super().run()
        if ALLOW_LIST.is_file() and not self.editable_mode:
            shutil.copy(ALLOW_LIST, pathlib.Path(self.build_lib) / "slicescheduler" / ALLOW_LIST.name)


setup(cmdclass={"build_py": BuildWithAllowList})
