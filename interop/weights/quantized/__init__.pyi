from .dequantized import QUANTIZATION_KEY as QUANTIZATION_KEY
from .dequantized import Dequantized as Dequantized
from .dequantized import QuantizationMethod as QuantizationMethod
from .dequantized import quantization_method as quantization_method
