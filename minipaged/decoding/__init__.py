"""How the next tokens are chosen, and when a text ends. Only `sampling` and `logits` need torch."""

from minipaged.decoding.beam_search import BeamSearch
from minipaged.decoding.checks import ParamsError
from minipaged.decoding.detokenizer import Detokenizer
from minipaged.decoding.methods import SamplingMethod
from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.decoding.stopping import OutputText, StopChecker, final_text

__all__ = [
    "BeamSearch",
    "BeamSearchParams",
    "DecodingParams",
    "Detokenizer",
    "OutputText",
    "ParamsError",
    "SamplingMethod",
    "SamplingParams",
    "StopChecker",
    "final_text",
]
