"""A small residual network in flax.linen, with batch statistics, and images the size of CIFAR's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from cairn import TrainState

CLASSES = 10


class ResidualBlock(linen.Module):
    features: int
    stride: int

    @linen.compact
    def __call__(self, x, train):
        residual = x
        y = linen.Conv(self.features, (3, 3), self.stride, use_bias=False)(x)
        y = linen.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        y = linen.Conv(self.features, (3, 3), use_bias=False)(linen.relu(y))
        y = linen.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        if residual.shape != y.shape:
            residual = linen.Conv(self.features, (1, 1), self.stride, name="shortcut")(residual)
        return linen.relu(residual + y)


class ResNet(linen.Module):
    widths: tuple[int, ...] = (8, 16)

    @linen.compact
    def __call__(self, x, train):
        x = linen.Conv(self.widths[0], (3, 3), 2, use_bias=False)(x)
        x = linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for width in self.widths:
            x = ResidualBlock(width, 2)(x, train)
        return linen.Dense(CLASSES)(x.mean((1, 2)))


MODEL = ResNet()
TX = optax.sgd(0.05, momentum=0.9)


class ResNetState(TrainState):
    batch_stats: Any
    epoch: int = 0


def images(seed=0, rows=8):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, rows).astype(np.int32)
    pixels = rng.normal(size=(rows, 32, 32, 3)).astype(np.float32)
    return {"image": jnp.asarray(pixels), "label": jnp.asarray(labels)}


@jax.jit
def _init(key):
    return MODEL.init(key, images()["image"], train=False)


def resnet_state(seed=0):
    variables = _init(jax.random.key(seed))
    return ResNetState.create(
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=TX,
        apply_fn=MODEL.apply,
    )


def resnet_loss(state, params, batch):
    logits, changed = state.apply_fn(
        {"params": params, "batch_stats": state.batch_stats},
        batch["image"],
        train=True,
        mutable=["batch_stats"],
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
    return losses.mean(), {"batch_stats": changed["batch_stats"], "accuracy": right.mean()}
