from .adopt import Adoption as Adoption
from .adopt import adopt as adopt
from .model_map import ModelLeaf as ModelLeaf
from .model_map import ModelMap as ModelMap
