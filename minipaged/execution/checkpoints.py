"""What the files of a model are; quantized weights, which transformers turns into floats while it reads them.

FP8 (DeepSeek V3, Qwen3-FP8) has a scale for each block of a matrix, MXFP4 (gpt-oss) a power of two for each
32 values. Every other kind is left to transformers and the package that it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils import is_peft_available
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

FP8, MXFP4 = "fp8 as floats", "mxfp4 as floats"
"""The names under which transformers knows our readers."""

READERS = {"fp8": FP8, "mxfp8": FP8, "mxfp4": MXFP4}
"""Kind of quantization that config.json names -> what makes floats of it."""

INSTEAD = "give the model in floats, FP8 or MXFP4"


class ModelLoadError(ValueError):
    """The model cannot be found or read; one line that says what to change."""


def check_directory(name: str, path: Path) -> None:
    """Raises ModelLoadError: `path` has no model, or an adapter that would be left out."""
    has_config, has_adapter = ((path / f"{kind}config.json").is_file() for kind in ("", "adapter_"))
    if has_adapter and not has_config:
        raise ModelLoadError(
            f"{name} holds an adapter without its model; merge them, or put both into one directory"
        )
    if has_adapter and not is_peft_available():
        raise ModelLoadError(
            f"{name} holds an adapter (adapter_config.json); "
            "pip install peft, or merge the adapter into the model"
        )
    if has_config:
        return
    raise ModelLoadError(f"{path} has no config.json; give the directory of a Hugging Face model")


class _Fp8Dequantize(Fp8Dequantize):
    """Takes blocks at the edges for what they are: transformers stretches its blocks to fit, or fails."""

    def _dequantize_one(
        self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        rows, columns = quantized.shape[-2:]
        height, width = self.hf_quantizer.quantization_config.weight_block_size or (1, 1)
        below, right = -rows % height, -columns % width
        blocks = (rows + below) // height, (columns + right) // width
        if (below or right) and tuple(scales.shape[-2:]) == blocks:
            whole = pad(quantized.float(), (0, right, 0, below))
            return super()._dequantize_one(whole, scales, output_dtype)[..., :rows, :columns].contiguous()
        return super()._dequantize_one(quantized, scales, output_dtype)


class _Reader:
    """Makes floats of quantized weights, and replaces no layer: so nothing else is needed, not even a GPU."""

    def validate_environment(self, *given: Any, **options: Any) -> None:
        pass

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def _process_model_before_weight_loading(self, *given: Any, **options: Any) -> Any:
        pass

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        """The weights get the types that they have without quantization, also those that never had any."""
        wider = model._get_dtype_plan(self._dtype)
        for name, weight in model.named_parameters():
            if weight.element_size() == 1:
                raise ValueError(f"{name} is in FP8, without a scale that transformers knows; {INSTEAD}")
            weight.data = weight.to(next((wider[part] for part in wider if part in name), self._dtype))
        return model


@register_quantizer(FP8)
class _Fp8Reader(_Reader, FineGrainedFP8HfQuantizer):
    def get_new_dtype(self, converter: Any, weight: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """None, so not a float, for 8 bits that nobody scales: then they are found afterwards."""
        stored = weight.get_dtype() if hasattr(weight, "get_dtype") else str(weight.dtype)
        return None if "8" in stored else super().get_new_dtype(converter, weight, dtype)

    def update_weight_conversions(self, *given: Any) -> Any:
        conversions = super().update_weight_conversions(*given)
        for conversion in conversions:
            if hasattr(conversion, "operations"):
                conversion.operations = [
                    _Fp8Dequantize(self) if type(operation) is Fp8Dequantize else operation
                    for operation in conversion.operations
                ]
        return conversions


@register_quantizer(MXFP4)
class _Mxfp4Reader(_Reader, Mxfp4HfQuantizer):
    pass


@register_quantization_config(MXFP4)
class _Mxfp4Config(Mxfp4Config):
    def __init__(self, **described: Any) -> None:
        super().__init__(**described)
        self.quant_method = MXFP4  # type: ignore[assignment]


register_quantization_config(FP8)(FineGrainedFP8Config)


def read_as_floats(name: str, config: PreTrainedConfig) -> str | None:
    """Have transformers make floats of quantized weights where it can; returns the kind where it cannot.

    Raises:
        ModelLoadError: transformers would take the quantized numbers for weights.
    """
    parts = (config, config.get_text_config(decoder=True))
    described = next((found for part in parts if (found := getattr(part, "quantization_config", None))), None)
    if described is None:
        return None
    kind = described.get("quant_method", "bitsandbytes")  # only bitsandbytes does not say
    if kind in READERS:
        described |= {"quant_method": READERS[kind], "dequantize": True}
        return None
    if kind not in {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"}:
        raise ModelLoadError(
            f"{name} has quantized weights ({kind}), which transformers cannot read; {INSTEAD}"
        )
    return kind
