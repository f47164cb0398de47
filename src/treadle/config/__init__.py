"""Load the configuration: frozen typed values from files and flags, checked before anything starts."""

from treadle.config.env import EnvConfig, ServerConfig
from treadle.config.load import load_run, save_run
from treadle.config.schema import EngineConfig, HubConfig, RunConfig
from treadle.config.section import DEFAULT_MODEL, Section
from treadle.config.train import TrainConfig

__all__ = [
    "DEFAULT_MODEL",
    "EngineConfig",
    "EnvConfig",
    "HubConfig",
    "RunConfig",
    "Section",
    "ServerConfig",
    "TrainConfig",
    "load_run",
    "save_run",
]
