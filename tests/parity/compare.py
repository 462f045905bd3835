"""The comparison of a run with a fixture, and the bounds that it is held to."""
import math

from cases import spread

UNIT_ROUNDOFF = {"fp32": 2.0**-24, "fp64": 2.0**-53}


def relative_error(found, expected):
    return abs(found - expected) / abs(expected)


def gradient_error(settings, precision):
    """Relative error of a gradient element: unit roundoff times the number of roundings on its longest path (Higham
    2002, section 3.1). The path: two products a layer each way and their norms, attention and activation, the head, the
    softmax over the vocabulary, and the sum over the tokens of a step."""
    C, ffn, T = (settings[f"model.{key}"] for key in ("hidden", "ffn", "seq_len"))
    layer = 4 * C + 2 * ffn + 2 * T
    tokens = settings["train.global_batch"] * T
    roundings = 2 * settings["model.layers"] * layer + 2 * C + settings["model.vocab"] + tokens
    return roundings * UNIT_ROUNDOFF[precision]


def weight_failures(fixture, weights, precision):
    """What is wrong with the final weights {name: flat list}: a line for each tensor that is off.

    A weight carries what its gradients' errors did to it (the fixture's sensitivity times gradient_error; an AdamW
    update can be off by twice the learning rate and no more, which is what bounds a key's bias, whose true gradient is
    zero), the rounding of its initial value, and one rounding of each update."""
    settings = fixture["settings"]
    steps, lr = settings["train.steps"], settings["optimizer.lr"]
    u, error = UNIT_ROUNDOFF[precision], gradient_error(settings, precision)
    most = 2 * lr * steps if settings["optimizer.kind"] == "adamw" else math.inf
    failures = []
    if sorted(weights) != sorted(fixture["tensors"]):
        return [f"tensors {sorted(weights)}, expected {sorted(fixture['tensors'])}"]
    for name, expected in fixture["tensors"].items():
        flat = weights[name]
        count = math.prod(expected["shape"])
        if len(flat) != count:
            failures.append(f"{name}: {len(flat)} elements, expected {count}")
            continue
        bound = min(error * expected["norm_sensitivity"], most * math.sqrt(count)) + 2 * steps * u * expected["norm"]
        off = abs(math.sqrt(math.fsum(x * x for x in flat)) - expected["norm"])
        if not off <= bound:
            failures.append(f"{name}: norm off by {off:.3g}, bound {bound:.3g}")
        for at, value, sensitivity in zip(spread(count), expected["value"], expected["sensitivity"]):
            bound = min(error * sensitivity, most) + 2 * steps * u * (abs(value) + lr)
            off = abs(flat[at] - value)
            if not off <= bound:
                failures.append(f"{name}[{at}]: {flat[at]!r}, expected {value!r}, off by {off:.3g}, bound {bound:.3g}")
    return failures
