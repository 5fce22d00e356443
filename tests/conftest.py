"""Shared by all tests: the CPU without compiled kernels, tiny models built once."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

# Before anything imports mlx: compiling takes seconds per model on the CPU.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")


@pytest.fixture(autouse=True)
def _logs_of_its_own():
    """A command that ran in this process set logging up for itself, not for others."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Callable[..., Path]:
    """Build a tiny random-weight model once per session; answers its directory."""
    built: dict[tuple, Path] = {}

    def build(arch: str, **options) -> Path:
        from kvport.snapshot.engine.builder import build_model

        key = (arch, *sorted(options.items()))
        if key not in built:
            directory = tmp_path_factory.mktemp("models") / arch
            build_model(arch, directory, **options)
            built[key] = directory
        return built[key]

    return build
