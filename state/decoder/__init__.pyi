from .cache import KVCache as KVCache
from .config import DecoderConfig as DecoderConfig
from .config import RopeConfig as RopeConfig
from .decoder import DecoderForCausalLM as DecoderForCausalLM
