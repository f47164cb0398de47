"""Start the trainer process. The module can be called: `treadle.train(...)` is the function of treadle/api.py.

Python binds the name `train` of the package to this module as soon as anything imports it.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from types import ModuleType
from typing import Any

from treadle.config import TrainConfig
from treadle.errors import Problems


def main(config: TrainConfig) -> None:
    """Train until the last step, or until SIGTERM, which saves a checkpoint first."""
    from treadle.sync.model_folders import cache_folder, find_model
    from treadle.train.requirements import check_trainer

    problems, folder = Problems(), None
    with problems.collected():
        folder = find_model(config.model) if "model" in config.model_fields_set else None
    with problems.collected():
        check_trainer(config, os.environ, folder)
    problems.raise_all()
    # torch's own default is below /tmp, which is emptied at a restart of the machine.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    gc.disable()  # collections take 0.8 of the 6 s of CPU of importing torch and transformers, and free nothing
    from treadle.train.process import run_trainer

    gc.freeze()  # later ones need not look at all these modules
    gc.enable()
    run_trainer(config)


class _Callable(ModuleType):
    def __call__(self, *args: Any, **settings: Any) -> Any:
        return importlib.import_module("treadle.api").train(*args, **settings)


sys.modules[__name__].__class__ = _Callable
