"""Inner parts of `state`, and of `storage` below it, that tests break, count, slow down or forge.

Everything else is set up and looked at as users do it, or other rooms of the package.
"""

from cairn.interop.weights import rule_slices
from cairn.state.adapters import adapted_layers, products, quantization, quantized_weight
from cairn.state.checkpointing import (
    checkpointer,
    device_digests,
    iterator_states,
    iterators,
    leaf_forms,
    modules,
    restore,
    save_handle,
)
from cairn.state.checkpointing.processes import coordination as process_coordination
from cairn.state.checkpointing.restores import (
    host_memory,
    local_leaves,
    read_plan,
    rule_leaves,
    shared_leaves,
    targets,
)
from cairn.state.checkpointing.saves import (
    dedup,
    engine,
    file_check,
    host_arrays,
    host_buffers,
    host_trees,
    listeners,
    pinned_warmup,
    preparation,
    process_records,
    save_job,
    save_metrics,
    staging,
    tree_writer,
)
from cairn.state.drop_in import containers
from cairn.state.models import (
    calls,
    flops,
    generation_arguments,
    generation_loop,
    generation_settings,
    kv_cache,
    sampling,
)
from cairn.state.models.decoder import attention, mlp, positions
from cairn.state.models.hub import hf_folder, whole_folder
from cairn.state.sharding import optimizers as sharded_optimizers
from cairn.state.states import (
    checkpoint,
    description,
    loadable,
    optimizers,
    quantized_load,
    rng_reuse,
)
from cairn.storage.arrays import data_files, four_bits
from cairn.storage.reading import local_shards
from cairn.storage.runs.records import layout
from tests.storage.seams import (
    chunks,
    data_file_writers,
    deadlines,
    lease,
    objects,
    rollback,
    writer,
)

__all__ = [
    "ACTIVATION_FUNCTIONS",
    "BITCAST",
    "BOX_BYTES",
    "MAX_FILE_BYTES",
    "MAX_REMOTE_FILE_BYTES",
    "METHODS",
    "NO_TOKEN",
    "OPTIMIZERS",
    "STORED_DTYPES",
    "WIDENED",
    "BoxToCopy",
    "Containers",
    "Dedup",
    "DeferredLeaf",
    "DeviceShard",
    "HostBox",
    "HostBuffers",
    "HostMemory",
    "HostTrees",
    "KVCache",
    "NotStorableError",
    "ProcessRecord",
    "SharedLeaf",
    "Slice",
    "Staging",
    "StepWrite",
    "Stop",
    "Transfers",
    "WrittenShard",
    "adapted",
    "adapted_layers",
    "as_items",
    "attempt_file",
    "attention",
    "batch_bytes",
    "batches",
    "begin_attempt",
    "begin_step",
    "check_files",
    "checked_rules",
    "checked_sampling",
    "checkpoint",
    "checkpointer",
    "chunks",
    "compile_digests",
    "coordination",
    "data_file_writers",
    "data_files",
    "deadlines",
    "decoder_flops",
    "dedup",
    "dequantize",
    "description",
    "divide_memory",
    "engine",
    "explain_optimizer",
    "filter_logits",
    "generation_loop",
    "grouped_attention",
    "has_digest",
    "host_arrays",
    "host_buffers",
    "host_trees",
    "host_views",
    "init_optimizer",
    "init_program",
    "iterator_states",
    "iterators",
    "last_to_keep",
    "leaf_forms",
    "listeners",
    "loadable",
    "local_leaves",
    "local_shards",
    "matmul_flops",
    "merged_settings",
    "model_streams",
    "objects",
    "optax_numerics",
    "pack_kernel",
    "packed_shape",
    "parse_records",
    "pinned_warmup",
    "places",
    "plan_waves",
    "pop_call_time",
    "preparation",
    "prepare",
    "product_of",
    "publish_manifest",
    "quantized_load",
    "quantizer",
    "read_records",
    "read_slices",
    "record_file",
    "records_to_bytes",
    "refused_save",
    "remove_records",
    "rng_reuse",
    "rotary_angles",
    "rotate",
    "rounded_activations",
    "rule_leaves",
    "sample",
    "save_job",
    "save_metrics",
    "sharded_weight",
    "shared_boxes",
    "shared_leaves",
    "slice_bytes",
    "staging",
    "start_digests",
    "state_from_json",
    "state_to_json",
    "static_arguments",
    "store_form",
    "stored_items",
    "targets",
    "tree_writer",
    "unpack",
    "viewed",
    "whole_folder",
    "writer",
]

# Modules whose functions tests replace, or whose limits they lower: `checkpointer`, `iterators`,
# `targets`, `local_leaves`, `shared_leaves`, those of saves, `whole_folder`, `loadable`,
# `quantized_load`, `rng_reuse`, `chunks`, `data_files`, `data_file_writers`, `local_shards`,
# `writer`, `objects`.

# Layers and products by themselves: a whole model hides which of them rounds.
METHODS = quantization.METHODS
adapted = adapted_layers.adapted
dequantize = quantized_weight.dequantize
pack_kernel = adapted_layers.pack_kernel
product_of = products.product_of
rounded_activations = adapted_layers.rounded_activations
quantizer = quantized_weight._quantizer
sharded_weight = quantized_weight._sharded

# What is stored of a leaf, an iterator or a process, in every form and with every damage.
BITCAST = leaf_forms.BITCAST
STORED_DTYPES = leaf_forms.STORED_DTYPES
WIDENED = leaf_forms.WIDENED
store_form = leaf_forms.store_form
NotStorableError = iterator_states.NotStorableError
state_from_json = iterator_states.state_from_json
state_to_json = iterator_states.state_to_json
ProcessRecord = process_records.ProcessRecord
WrittenShard = process_records.WrittenShard
parse_records = process_records.parse_records
read_records = process_records.read_records
record_file = process_records.record_file
records_to_bytes = process_records.records_to_bytes
remove_records = process_records.remove_records
Containers = containers.Containers
packed_shape = four_bits.packed_shape
unpack = four_bits.unpack
check_files = file_check.check_files
stored_items = restore.stored_items
as_items = modules.as_items

# Digests of one array on its device.
DeviceShard = device_digests.DeviceShard
compile_digests = device_digests.compile_digests
has_digest = device_digests.has_digest
start_digests = device_digests.start_digests

# Plans of waves, windows, buffers and batches, of more bytes than a test has.
BOX_BYTES = read_plan.BOX_BYTES
SharedLeaf = read_plan.SharedLeaf
batch_bytes = read_plan.batch_bytes
batches = read_plan.batches
shared_boxes = read_plan.shared_boxes
HostMemory = host_memory.HostMemory
BoxToCopy = staging.BoxToCopy
Staging = staging.Staging
divide_memory = staging.divide_memory
plan_waves = staging.plan_waves
HostBuffers = host_buffers.HostBuffers
places = host_buffers.places
MAX_FILE_BYTES = data_file_writers.MAX_FILE_BYTES
MAX_REMOTE_FILE_BYTES = data_file_writers.MAX_REMOTE_FILE_BYTES

# Stations of a save, which tests hold back, count or have fail.
Dedup = dedup.Dedup
DeferredLeaf = host_arrays.DeferredLeaf
HostBox = host_arrays.HostBox
HostTrees = host_trees.HostTrees
StepWrite = engine.StepWrite
Transfers = host_arrays.Transfers
begin_step = engine.begin_step
coordination = process_coordination.coordination
host_views = host_arrays.host_views
pop_call_time = save_handle.pop_call_time
prepare = preparation.prepare
refused_save = save_handle.refused_save
viewed = host_arrays.viewed
attempt_file = layout.attempt_file
begin_attempt = lease.begin_attempt
last_to_keep = rollback.last_to_keep
publish_manifest = writer.publish_manifest

# Numbers of a forward pass, a drawn token and an optimizer, against torch, XLA and Optax.
ACTIVATION_FUNCTIONS = mlp.ACTIVATION_FUNCTIONS
KVCache = kv_cache.KVCache
NO_TOKEN = sampling.NO_TOKEN
OPTIMIZERS = optimizers.OPTIMIZERS
Stop = generation_loop.Stop
checked_rules = generation_arguments.checked_rules
checked_sampling = generation_arguments.checked_sampling
decoder_flops = flops.decoder_flops
explain_optimizer = sharded_optimizers.explain_optimizer
filter_logits = sampling.filter_logits
grouped_attention = attention.grouped_attention
init_optimizer = optimizers.init_optimizer
init_program = optimizers.init_program
matmul_flops = flops.matmul_flops
merged_settings = generation_settings.merged_settings
optax_numerics = optimizers.optax_numerics
rotary_angles = positions.rotary_angles
rotate = positions.rotate
sample = sampling.sample
static_arguments = calls.static_arguments

# Tensors and slices of a model that is written or read, one by one.
Slice = rule_slices.Slice
model_streams = hf_folder.model_streams
read_slices = rule_slices.read_slices
slice_bytes = rule_slices.slice_bytes
