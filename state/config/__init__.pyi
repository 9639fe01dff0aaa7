from .auto import AutoEasyDeLConfig as AutoEasyDeLConfig
from .base import EDPretrainedConfig as EDPretrainedConfig
from .decoder import OURS_ALONE as OURS_ALONE
from .decoder import DecoderConfig as DecoderConfig
from .decoder import RopeConfig as RopeConfig
from .frequencies import inverse_frequencies as inverse_frequencies
from .frequencies import llama3_divisors as llama3_divisors
from .frozen import FrozenJSON as FrozenJSON
