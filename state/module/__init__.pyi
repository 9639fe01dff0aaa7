from .base import EasyDeLBaseModule as EasyDeLBaseModule
from .generation import EasyGenerationMixin as EasyGenerationMixin
from .generation import GenerationOutput as GenerationOutput
from .kv_cache import KVCache as KVCache
from .loss import LossConfig as LossConfig
from .operation_cache import OperationCacheMixin as OperationCacheMixin
from .outputs import CausalLMOutput as CausalLMOutput
from .router_loss import load_balancing_loss as load_balancing_loss
