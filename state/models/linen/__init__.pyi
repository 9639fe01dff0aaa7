from .decoder import LinenDecoderForCausalLM as LinenDecoderForCausalLM
from .model import EDPretrainedModel as EDPretrainedModel
