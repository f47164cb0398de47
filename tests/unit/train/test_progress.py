"""What the trainer tells of itself before its first publish: how far its own copy of the weights is loaded."""

from __future__ import annotations

from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.loading import report_loading
from treadle.sync.modes import OfflineSync
from treadle.train.watched import Progress, WatchedMode
from treadle.watch.waits import Waits


def test_the_weights_of_a_load_are_counted_until_the_first_version_is_out(tmp_path):
    config = TrainConfig(weight_bridge_mode="offline", save_path=tmp_path)
    mode = WatchedMode(OfflineSync(config), Waits(), config)
    progress = Progress(mode, lambda: None)
    assert progress.about().work is None
    with report_loading(progress.loads):
        model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "model"))
    told = progress.about()
    assert told.state == "loading"
    assert told.work is not None
    assert told.work.done == told.work.total == len(list(model.named_parameters()))
    mode.version = 3
    assert (progress.about().state, progress.about().work) == ("training step 4", None)
