"""What pyproject.toml cannot say: the files of data/ travel inside the package, as minivllm/data."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """No modules of data/: those programs made the model and its text, and are run in the repository."""
        return [] if package == "minivllm.data" else super().find_package_modules(package, package_dir)


setup(
    packages=[*find_packages(include=["minivllm", "minivllm.*"]), "minivllm.data"],
    package_dir={"minivllm.data": "data"},
    package_data={"minivllm.data": ["*.json", "tiny/*"]},
    cmdclass={"build_py": BuildPy},
)
