"""Readers that turn quantized weights into floats, registered with transformers when this module is imported.

Built on transformers' own, whose names may change: so it is imported only for quantized weights.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

FP8, MXFP4 = "fp8 as floats", "mxfp4 as floats"
"""The names under which transformers knows these readers."""

READERS = {"fp8": FP8, "mxfp8": FP8, "mxfp4": MXFP4}
"""Kind of quantization that config.json names -> what makes floats of it."""


class _Fp8Dequantize(Fp8Dequantize):
    """Takes smaller blocks at the edges as they are: transformers stretches its blocks to fit, or fails."""

    def _dequantize_one(
        self, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        if quantized.dtype == torch.uint8:
            raise ValueError("bytes are not numbers")
        rows, columns = quantized.shape[-2:]
        height, width = self.hf_quantizer.quantization_config.weight_block_size or (1, 1)
        below, right = -rows % height, -columns % width
        blocks = (rows + below) // height, (columns + right) // width
        if (below or right) and tuple(scales.shape[-2:]) == blocks:
            whole = pad(quantized.float(), (0, right, 0, below))
            return super()._dequantize_one(whole, scales, output_dtype)[..., :rows, :columns].contiguous()
        return super()._dequantize_one(quantized, scales, output_dtype)

    def convert(self, input_dict: dict[str, Any], *given: Any, **options: Any) -> dict[str, Any]:
        """What cannot be scaled is found afterwards, and named."""
        weights = {name: tensors for name, tensors in input_dict.items() if "_scale" not in name}
        try:
            converted = super().convert(input_dict, *given, **options)
        except (ValueError, RuntimeError):
            return super().convert(weights, *given, **options)
        if len(weights) < len(input_dict):
            self.hf_quantizer.unscaled -= converted.keys()
        return converted


class _Reader:
    """Makes floats of quantized weights, and replaces no layer: so nothing else is needed, not even a GPU."""

    def validate_environment(self, *given: Any, **options: Any) -> None:
        pass

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def __deepcopy__(self, memo: Any) -> Any:
        """One for all weights: transformers copies what reads a weight, and with it this reader."""
        return self

    def _process_model_before_weight_loading(self, model: Any, *given: Any, **options: Any) -> Any:
        self.unscaled: set[str] = set()
        for file in options["checkpoint_files"]:
            if file.endswith(".safetensors"):
                with safe_open(file, "pt") as opened:
                    names = opened.keys()
                    self.unscaled |= {name for name in names if "8" in opened.get_slice(name).get_dtype()}
        every = model.named_parameters(remove_duplicate=False)
        self._own_dtypes = {name: weight.dtype for name, weight in every}

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        """The weights get the types that they have without quantization, also those that never had any."""
        wider = model._get_dtype_plan(self._dtype)
        for name, weight in model.named_parameters():
            if weight.element_size() == 1 or name in self.unscaled:
                raise ValueError(
                    f"{name} is in 8 bits, without a scale that transformers knows; give the model in floats"
                )
            if weight.isnan().any():
                raise ValueError(f"{name} holds NaN, in itself or its scale; the checkpoint is damaged")
            own = self._own_dtypes[name]
            weight.data = weight.to(next((wider[part] for part in wider if part in name), own))
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
