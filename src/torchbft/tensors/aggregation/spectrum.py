"""The direction in which a set of rows spreads most, read from their Gram matrix.

Shapes: S matrices, N rows.
"""

from __future__ import annotations

import numpy as np
import torch

from torchbft.tensors.exact import Float64s, magnitude, quantise_, sqrt, sum_in_order

SQUARINGS = 10
"""The matrix to the power 2^10: a second eigenvalue 1 % below the first is left with weight
3e-5, and one that is nearer spreads as far within 1 %."""
REFINEMENTS = 2
"""Steps with the matrix itself afterwards, which take away what squaring rounded."""


def gram_about(gram_NN: Float64s, weights_N: Float64s) -> Float64s:
    """Return the inner products of x_i − Σ w_k·x_k, for weights of sum 1."""
    product_N = sum_in_order(gram_NN * weights_N)
    square = sum_in_order(product_N * weights_N)
    centred_NN: Float64s = gram_NN - (product_N[:, None] + product_N) + square
    return centred_NN


def top_eigenpairs(matrices_SNN: Float64s) -> tuple[Float64s, Float64s]:
    """Return the largest eigenvalue (S) of positive semidefinite matrices and a vector (S, N).

    Vectors have length 1; for a matrix of zeros the value is 0 and the vector is zero. By repeated
    squaring on quantised operands, whose products are exact: unlike LAPACK's the bits do not
    depend on the machine, and unlike power iteration no start vector can be made orthogonal to the
    answer.
    """
    power_SNN = np.ascontiguousarray(matrices_SNN)
    for _ in range(SQUARINGS):
        rounded_SNN = quantise_(_scaled(power_SNN))
        power_SNN = torch.bmm(rounded_SNN, rounded_SNN.mT).numpy()
    diagonal_SN = np.diagonal(power_SNN, axis1=1, axis2=2)
    sets = np.arange(len(power_SNN))
    vectors_SN = _of_length_one(power_SNN[sets, diagonal_SN.argmax(1)])
    for _ in range(REFINEMENTS):
        vectors_SN = _of_length_one(sum_in_order(matrices_SNN * vectors_SN[:, None, :]))
    images_SN = sum_in_order(matrices_SNN * vectors_SN[:, None, :])
    return sum_in_order(images_SN * vectors_SN), vectors_SN


def _scaled(matrices_SNN: Float64s) -> Float64s:
    largest_S = magnitude(matrices_SNN.reshape(len(matrices_SNN), -1), -1)
    divisors_S = np.where(largest_S > 0.0, largest_S, 1.0)
    scaled: Float64s = matrices_SNN / divisors_S[:, None, None]
    return scaled


def _of_length_one(vectors_SN: Float64s) -> Float64s:
    scaled_SN = _scaled(vectors_SN[:, None, :])[:, 0]
    lengths_S = sqrt(sum_in_order(scaled_SN * scaled_SN))
    unit: Float64s = scaled_SN / np.where(lengths_S > 0.0, lengths_S, 1.0)[:, None]
    return unit
