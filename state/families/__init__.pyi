from .family import Family as Family
from .family import get_family as get_family
from .family import get_gguf_family as get_gguf_family
from .gguf_form import GGUFContent as GGUFContent
from .gguf_form import GGUFForm as GGUFForm
from .gguf_writing import GGUFModel as GGUFModel
from .gguf_writing import gguf_model as gguf_model
from .gguf_writing import gguf_rules as gguf_rules
