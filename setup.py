"""Finds the packages, two of which have another name than their folder here; all else is in pyproject.toml."""

from __future__ import annotations

from setuptools import find_packages, setup

FOLDERS = {"gymdata": "gymdata", "gymdata_cli": "cli", "gymdata_sample_data": "sample_data"}

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
    ],
)
