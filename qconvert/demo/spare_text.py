"""A few kilobytes of our own about quantization, read where an installation carries no library sources.

`SPARE_TEXT` is a module's worth of prose and code in the manner of the standard library, a little longer
than one window of the embedded model. It is evaluation text and nothing else: no code in it is ever run.
"""

from typing import Final

SPARE_TEXT: Final = '''"""Rounding weights to few bits: what is kept, what is lost, and how to tell.

A language model is a long list of matrices. Each of them was trained in a floating point format with
sixteen or thirty-two bits per number, and each of them can usually be stored with far fewer. The idea
is old: choose a small set of levels, replace every number by the nearest level, and store only which
level was chosen. The reader of the file looks the level up again. The difference between the number
that was trained and the number that is read back is called the quantization error.

Why does this work at all? The numbers of one row of a weight matrix are close together. Most of them
lie within a few standard deviations of zero, and the sum of many small errors with random signs grows
only with the square root of their count. A matrix product adds hundreds or thousands of terms, so the
errors of the single weights partly cancel. What does not cancel is an error that always has the same
sign, and this is why a good method looks at the mean of the error and not only at its size.

Groups and scales
-----------------

One scale for a whole matrix would have to fit the largest weight in it. All the other weights would
then share the few levels near zero. The usual remedy is to cut each row into groups of 32, 64 or 128
neighbouring weights, and to give every group a scale of its own:

    scale = largest magnitude in the group / largest code
    code  = round(weight / scale)

With four bits and a symmetric grid the codes run from -8 to 7. A group of 128 weights then costs 512
bits for the codes and 16 bits for the scale, which is 4.125 bits per weight. Smaller groups follow the
weights more closely but cost more: with 32 weights in a group the same sum gives 4.5 bits. There is no
best answer, only a trade between the size of the file and the distance from the original.

An asymmetric grid stores a second number for each group, the zero point, and moves the levels to where
the weights are. This helps when a group is not centred on zero. Some formats store the zero point as an
integer code, some store the smallest weight of the group as a floating point number, and a file of one
kind cannot always be turned into a file of the other kind without rounding again.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """The codes of one group of weights together with the scale that they share."""

    codes: list
    scale: float

    def values(self):
        """Return the weights as a reader of the file will see them."""
        return [code * self.scale for code in self.codes]


def quantize_group(weights, bits=4):
    """Quantize a list of weights to a symmetric grid and return a Group.

    The largest code is 2 ** (bits - 1) - 1. If all weights are zero, the scale is one and all codes are
    zero, so that no division by zero can happen. ValueError is raised if bits is less than two or if the
    list is empty.

    >>> group = quantize_group([0.5, -0.25, 0.125, 0.0], bits=4)
    >>> group.codes
    [7, -4, 2, 0]
    >>> len(group.values())
    4
    """
    if bits < 2:
        raise ValueError("a symmetric grid needs at least two bits, got %d" % bits)
    if not weights:
        raise ValueError("cannot quantize an empty group")
    top = 2 ** (bits - 1) - 1
    largest = max(abs(weight) for weight in weights)
    if largest == 0:
        return Group([0] * len(weights), 1.0)
    scale = largest / top
    codes = [min(top, max(-top - 1, round(weight / scale))) for weight in weights]
    return Group(codes, scale)


def quantize_row(row, group_size=32, bits=4):
    """Cut a row into groups of the given size and quantize each of them.

    The last group may be shorter than the others. The result is a list of Group objects in the order of
    the row.
    """
    groups = []
    for start in range(0, len(row), group_size):
        groups.append(quantize_group(row[start : start + group_size], bits))
    return groups


def root_mean_square_error(row, groups):
    """Return the root of the mean squared difference between a row and its quantized form."""
    restored = []
    for group in groups:
        restored.extend(group.values())
    if len(restored) != len(row):
        raise ValueError("expected %d values, got %d" % (len(row), len(restored)))
    total = sum((a - b) ** 2 for a, b in zip(row, restored))
    return math.sqrt(total / len(row))


# Measuring a model
#
# The error of the weights is easy to compute, but it is not what a user cares about. A user wants to know
# whether the model still gives the same answers. There are three common measures, and each of them
# answers a different question.
#
# Perplexity asks how surprised the model is by a text that it has never seen. It is the exponential of the
# mean negative logarithm of the probability that the model gave to each token. A model that knows nothing
# and gives the same probability to every token has a perplexity equal to the size of its vocabulary. A
# model that is always certain and always right has a perplexity of one.
#
# The divergence of Kullback and Leibler compares the two models directly. For each position it compares
# the probabilities of all tokens before and after quantization, and not only the probability of the token
# that happened to follow. It is zero if and only if both models say exactly the same thing.
#
# The agreement of the first choice counts how often both models would have picked the same token. It is
# the easiest of the three to explain, and the least sensitive.


def perplexity(logarithms):
    """Return the perplexity for a list of natural logarithms of probabilities.

    >>> perplexity([math.log(0.5), math.log(0.5)])
    2.0
    """
    if not logarithms:
        raise ValueError("perplexity of an empty text is not defined")
    return math.exp(-sum(logarithms) / len(logarithms))


def divergence(before, after):
    """Return the Kullback-Leibler divergence of two lists of probabilities, in nats.

    Both lists must have the same length and should each add up to one. Terms with a probability of zero in
    the first list do not count.
    """
    total = 0.0
    for p, q in zip(before, after):
        if p > 0:
            total += p * math.log(p / q)
    return total


def standard_error(values):
    """Return the standard error of the mean of a list of numbers.

    Two models that are run on the same text should be compared pair by pair: compute the difference for
    every chunk of the text first, and the standard error of these differences afterwards. Both models find
    the same chunks hard and the same chunks easy, so most of the noise is common to both and disappears in
    the difference.
    """
    count = len(values)
    if count < 2:
        return math.nan
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return math.sqrt(variance / count)


if __name__ == "__main__":
    row = [math.sin(index) * 0.02 for index in range(256)]
    for bits in (2, 3, 4, 8):
        error = root_mean_square_error(row, quantize_row(row, bits=bits))
        print("%d bits: %.6f" % (bits, error))
'''
