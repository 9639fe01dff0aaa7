"""The router's loss: transformers' values, the paper's minimum, padding, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from cairn import ArgumentError, load_balancing_loss

LAYERS, BATCH, TOKENS, EXPERTS = 3, 2, 7, 5


@pytest.fixture
def logits():
    generator = np.random.default_rng(0)
    return generator.normal(size=(LAYERS, BATCH, TOKENS, EXPERTS)).astype(np.float32) * 2


def padding():
    mask = np.ones((BATCH, TOKENS), np.int32)
    mask[0, :3] = 0
    return mask


def theirs(logits, top_k, mask):
    flat = tuple(layer.reshape(-1, EXPERTS) for layer in logits)
    given = None if mask is None else torch.tensor(mask)
    return load_balancing_loss_func(flat, EXPERTS, top_k, given)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_value_and_gradient_equal_transformers(logits, top_k, masked):
    mask = padding() if masked else None
    given = torch.tensor(logits, requires_grad=True)
    expected = theirs(given, top_k, mask)
    expected.backward()
    our_mask = None if mask is None else jnp.asarray(mask)
    loss, grads = jax.jit(
        jax.value_and_grad(lambda x: load_balancing_loss(x, EXPERTS, top_k, our_mask))
    )(jnp.asarray(logits))
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(grads, given.grad.numpy(), atol=1e-6)
    flat = [jnp.asarray(layer.reshape(-1, EXPERTS)) for layer in logits]
    np.testing.assert_allclose(load_balancing_loss(flat, EXPERTS, top_k, our_mask), loss, rtol=1e-6)


def test_an_even_spread_gives_the_papers_minimum_and_one_expert_for_all_its_maximum():
    even = jnp.eye(EXPERTS)[None, None] * 50.0
    np.testing.assert_allclose(load_balancing_loss(even, EXPERTS, 1), 1.0, rtol=1e-6)
    same = jnp.zeros((1, 1, EXPERTS, EXPERTS)).at[..., 2].set(50.0)
    np.testing.assert_allclose(load_balancing_loss(same, EXPERTS, 1), EXPERTS, rtol=1e-6)


def test_padding_alone_has_loss_zero_and_no_gradient(logits):
    nothing = jnp.zeros((BATCH, TOKENS), jnp.int32)
    loss, grads = jax.value_and_grad(lambda x: load_balancing_loss(x, EXPERTS, 2, nothing))(
        jnp.asarray(logits)
    )
    assert loss == 0.0
    assert not np.any(grads)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 4}, r"router_logits: expected layers of shape \(batch, tokens, 4\)"),
        ({"router_logits": []}, "found 0 layers"),
        ({"top_k": 6}, "top_k: expected from 1 to 5; found 6"),
        ({"top_k": 0}, "top_k"),
        ({"attention_mask": jnp.ones((2, 3))}, "one number for each of 14 tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(logits, changes, said):
    arguments = {"router_logits": jnp.asarray(logits), "num_experts": EXPERTS, **changes}
    with pytest.raises(ArgumentError, match=said):
        load_balancing_loss(**arguments)
