from .reading import GGUFFile as GGUFFile
from .writing import GGUF_TYPES as GGUF_TYPES
from .writing import stored_gguf as stored_gguf
