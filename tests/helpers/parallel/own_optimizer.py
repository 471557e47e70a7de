"""Optimizers of a user's own, for `optimizer.name`."""

import optax


def amsgrad(config):
    return optax.scale_by_amsgrad(config.b1, config.b2, config.eps)


def flat(config):
    """Its moments are vectors of all parameters, which belong to none of them."""
    return optax.flatten(optax.scale_by_adam(config.b1, config.b2, config.eps))


def nothing(config):
    return config.b1
