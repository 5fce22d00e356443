"""Tests named by public reports of what breaks in prefix caches; engines as in engine/.

A test's docstring retells what triggered the report; its name has the report's number
and the outcome that is right.
"""

import contextlib
import json
import os
import shutil
import sys
import types

import pytest
from mlx_lm.models import llama

from tests.engine.conftest import prompt, rig

__all__ = ["failing_fsync", "prompt", "rig", "toy_dir"]


@pytest.fixture
def failing_fsync(monkeypatch):
    """`with failing_fsync(number, sizes)`: files of these sizes meet an error."""
    real = os.fsync

    @contextlib.contextmanager
    def failing(number, sizes=None):
        def fsync(fd):
            if sizes is None or os.fstat(fd).st_size in sizes:
                raise OSError(number, "injected")
            real(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            yield

    return failing


@pytest.fixture
def toy_dir(model_dir, tmp_path, monkeypatch):
    """A directory from which mlx-lm loads a class of ours, with llama's weights."""

    def make(cls):
        module = types.ModuleType(f"mlx_lm.models.{cls.__name__.lower()}")
        module.Model, module.ModelArgs = cls, llama.ModelArgs
        monkeypatch.setitem(sys.modules, module.__name__, module)
        directory = tmp_path / cls.__name__
        shutil.copytree(model_dir("llama"), directory)
        config = json.loads((directory / "config.json").read_text())
        config["model_type"] = cls.__name__.lower()
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return make
