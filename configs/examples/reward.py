"""A reward: how near a digit is to the answer of a sum."""


def near(prompt, text, tokens):
    """Two components, which are added up and logged separately; at most 1 together.

    Args:
        prompt: has ``answer`` and every other field of its line in ``meta``
        text: of the response, without the token that ended it
        tokens: the same as token ids
    """
    digit = text.strip()
    if len(digit) != 1 or digit not in "0123456789":
        return {"near": 0.0, "right": 0.0}
    distance = abs(int(digit) - int(prompt.answer))
    return {"near": 0.5 * (1 - distance / 9), "right": 0.5 * (distance == 0)}
