"""Functions that broken configs name."""


def loss(logprobs, entropy, fields):
    return logprobs.sum(), fields.loss_mask.sum(), {}


def close(prompt, text, tokens):
    return 0.0
