from .filling import read_leaves as read_leaves
from .shared_leaves import agreed_shared as agreed_shared
from .shared_leaves import read_shared as read_shared
from .targets import Casts as Casts
from .targets import PlacedLeaf as PlacedLeaf
from .targets import TargetLeaf as TargetLeaf
from .targets import target_leaf as target_leaf
