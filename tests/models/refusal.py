"""The error for a model that cannot be loaded."""

from pathlib import Path

import pytest
import torch

from minipaged.config import EngineConfig
from minipaged.execution.loading import ModelLoadError, load_model


def refusal(name: str | Path) -> str:
    """The one line, which names the model."""
    with pytest.raises(ModelLoadError) as error:
        load_model(str(name), EngineConfig(), torch.device("cpu"))
    message = str(error.value)
    assert "\n" not in message
    assert str(name) in message
    return message
