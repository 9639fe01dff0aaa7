from .family import get_family as get_family
from .family import get_gguf_family as get_gguf_family
