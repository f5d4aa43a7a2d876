"""Build script: everything static is in pyproject.toml; here only the file that Python reads at its start."""

import os

from setuptools import setup
from setuptools.command.build_py import build_py

STARTUP_FILE = "deepspeed_lean.pth"


class BuildWithStartupFile(build_py):
    """Puts the .pth file beside the package: pyproject.toml can only name files inside of packages."""

    def run(self) -> None:
        """Build the package, then the file."""
        super().run()
        if not self.editable_mode:
            self.copy_file(STARTUP_FILE, os.path.join(self.build_lib, STARTUP_FILE))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Returns all files that are built."""
        return [*super().get_outputs(include_bytecode), os.path.join(self.build_lib, STARTUP_FILE)]

    def get_source_files(self) -> list[str]:
        """Returns all files that an sdist needs."""
        return [*super().get_source_files(), STARTUP_FILE]


setup(cmdclass={"build_py": BuildWithStartupFile})
