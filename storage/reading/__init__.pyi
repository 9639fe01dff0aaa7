from .item_arrays import ItemArrays as ItemArrays
from .item_arrays import LeafInfo as LeafInfo
from .leaf_reads import LeafReads as LeafReads
from .leaf_reads import WholeChunk as WholeChunk
from .reader import CheckpointReader as CheckpointReader
from .verify import VerifyReport as VerifyReport
from .verify import verify_step as verify_step
