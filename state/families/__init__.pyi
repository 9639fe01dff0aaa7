from .family import Family as Family
from .family import get_family as get_family
from .family import get_gguf_family as get_gguf_family
from .gguf_form import GGUFContent as GGUFContent
from .gguf_form import GGUFForm as GGUFForm
