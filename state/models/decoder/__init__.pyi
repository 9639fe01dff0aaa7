from .decoder import DecoderForCausalLM as DecoderForCausalLM
