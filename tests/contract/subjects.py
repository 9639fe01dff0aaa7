"""What the contract's tests are run on: a small model, states of it, and how to look at them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from cairn import DecoderConfig, DecoderForCausalLM, make_optimizer
from cairn.state.paths import named_leaves
from tests.state.my_model import my_model

TX, TX_INIT = make_optimizer("adamw", learning_rate=1e-2)
SGD, SGD_INIT = make_optimizer("sgd", learning_rate=0.5)
SAME_MESH = {"sharding_axis_dims": (2, 4, 1, 1), "auto_shard_model": True, "verbose": False}
RULES = (
    ("embedding", PartitionSpec(None, "fsdp")),
    (r"layers/\d+/kernel", PartitionSpec("fsdp")),
    (".*", PartitionSpec()),
)
"""Other places than the automatic ones: the embedding by columns, the kernels by rows."""

DECODER = DecoderConfig(
    model_type="llama",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    sharding_axis_dims=(2, 4, 1, 1),
)


def make_state(**arguments):
    """A sharded state of MyModel with AdamW, at step 0."""
    return my_model().shard_model().to_state(TX, tx_init=TX_INIT, **arguments)


def make_decoder(config=DECODER, seed=0, **settings):
    """The one decoder, with random weights on one device."""
    return DecoderForCausalLM(config, rngs=nnx.Rngs(seed), **settings)


def ones_like(tree):
    """Gradients that are one everywhere."""
    return jax.tree.map(jnp.ones_like, tree)


def host(tree):
    """Every leaf on the host, by path; random keys as their data."""
    found = {}
    for named in named_leaves(tree):
        leaf = named.leaf
        if jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[named.path] = np.array(leaf)
    return found


def assert_same_bits(one, other):
    """Both trees have the same paths, and each leaf the same dtype, shape and bits."""
    one, other = host(one), host(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        assert (leaf.dtype, leaf.shape) == (other[path].dtype, other[path].shape), path
        assert leaf.tobytes() == other[path].tobytes(), path


def specs(tree):
    """The PartitionSpec of every leaf, by path."""
    return {named.path: named.leaf.sharding.spec for named in named_leaves(tree)}
