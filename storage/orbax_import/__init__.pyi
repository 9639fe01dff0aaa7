from .adopt import Adoption as Adoption
from .adopt import adopt as adopt
from .adopt import check_adoption as check_adoption
from .model_map import ModelLeaf as ModelLeaf
from .model_map import ModelMap as ModelMap
