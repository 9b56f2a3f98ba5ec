"""What the kernels for rows compute in one part: some rows of one block of columns (`row_blocks`).

Columns are computed side by side, each with its own coefficients in memory. What the columns of a
channel add up to is added in float64. `power`, `centre` and the coefficients are explained in
`numerics`.

Arguments that many functions share:

    part      the rows and columns to compute, and their channels (`row_blocks.Part`)
    inner     neighbouring columns that belong to one channel
    height    rows of one tile
    lines     scratch memory for one value per column, in the computing dtype of `x`
    numbers   scratch memory for one float64 value per channel
    first     sums per column of d, or of dy
    second    sums per column of d**2, or of dy * (x * power - centre)
    valid     (R,), uint8: which rows count, if B is 1 and rows are not joined; None for all

Functions that take a `part` get per-channel arguments of all channels and slice them. Loops over
channels run over slices, from index 0: with an offset in the index they would not be vectorized.
"""

from __future__ import annotations

import numpy as np

from syncbn_core._kernels.cpu.activations import activated, incoming, value_of
from syncbn_core._kernels.cpu.builds import may_contract, strict
from syncbn_core._kernels.cpu.numerics import (
    affine,
    affine_coefficients,
    at,
    float32_fails,
    gradient,
    gradient_coefficients,
    kept,
    kept_of,
    merge,
    narrow,
    power_of,
    rounded,
    value_or,
    widen,
    xhat_sum,
)
from syncbn_core._kernels.cpu.row_blocks import fill_columns, sum_columns

__all__ = [
    "add_chunks",
    "merge_chunks",
    "part_gradient",
    "part_moments",
    "part_normalize",
    "part_products",
]


# -------------------------------------------------------------- loops over columns
#
# Rows are sliced one by one: Numba does not know that a block `x[:, left:right]` has unit stride,
# and the compiler would not vectorize loops over it. Sums add four rows at a time.


@may_contract
def _add(x, valid, left, right, begin, end, total):
    """`total += sum(x)` over the rows `begin` to `end`."""
    single = begin if valid is not None else end - (end - begin) % 4
    for r in range(begin, single - 3, 4):
        a, b = x[r, left:right], x[r + 1, left:right]
        c, d = x[r + 2, left:right], x[r + 3, left:right]
        for i in range(total.shape[0]):
            total[i] += (widen(a[i]) + widen(b[i])) + (widen(c[i]) + widen(d[i]))
    for r in range(single, end):
        if kept(valid, r):
            a = x[r, left:right]
            for i in range(total.shape[0]):
                total[i] += widen(a[i])


@may_contract
def _add_deviations(x, valid, left, right, begin, end, shift, first, second):
    """`first += sum(d)`, `second += sum(d**2)` with `d = x - shift`, over rows."""
    single = begin if valid is not None else end - (end - begin) % 4
    for r in range(begin, single - 3, 4):
        a, b = x[r, left:right], x[r + 1, left:right]
        c, d = x[r + 2, left:right], x[r + 3, left:right]
        for i in range(first.shape[0]):
            s = shift[i]
            p, q = widen(a[i]) - s, widen(b[i]) - s
            u, v = widen(c[i]) - s, widen(d[i]) - s
            first[i] += (p + q) + (u + v)
            second[i] += (p * p + q * q) + (u * u + v * v)
    for r in range(single, end):
        if kept(valid, r):
            a = x[r, left:right]
            for i in range(first.shape[0]):
                p = widen(a[i]) - shift[i]
                first[i] += p
                second[i] += p * p


@may_contract
def _add_products(
    x, dy, valid, left, right, begin, end, act, power, centre, scale, shift, first, second
):
    """`first += sum(dz)`, `second += sum(dz * (x * power - centre))` over rows.

    Here and below, `power` has one number per column, or is one number for all.
    """
    for r in range(begin, end):
        if kept(valid, r):
            a, g = x[r, left:right], dy[r, left:right]
            for i in range(first.shape[0]):
                p = incoming(act, a[i], g[i], at(power, i), centre[i], scale[i], shift[i])
                first[i] += p
                second[i] += p * (widen(value_of(act, a[i])) * at(power, i) - centre[i])


@may_contract
def _affine(source, act, power, centre, scale, shift, target):
    """Write `y` of one row to `target`."""
    for i in range(source.shape[0]):
        z = affine(source[i], at(power, i), centre[i], scale[i], shift[i])
        target[i] = narrow(activated(act, z), target)


@may_contract
def _gradient(source, grad, act, power, centre, scale, bias, of_dy, of_x, shift, target):
    """Write `dx` of one row to `target`."""
    for i in range(source.shape[0]):
        dz = incoming(act, source[i], grad[i], at(power, i), centre[i], scale[i], bias[i])
        x = value_of(act, source[i])
        dx = gradient(x, dz, at(power, i), centre[i], of_dy[i], of_x[i], shift[i])
        target[i] = narrow(dx, target)


# ------------------------------------------------------------------ sums of one part


@strict
def _merge_in(count, mean, m2, other_count, other_mean, other_m2):
    """`numerics.merge` for each channel, in place; returns the new count."""
    if count == 0.0:
        for c in range(mean.shape[0]):
            mean[c], m2[c] = other_mean[c], other_m2[c]
    else:
        for c in range(mean.shape[0]):
            mean[c], m2[c] = merge(count, mean[c], m2[c], other_count, other_mean[c], other_m2[c])
    return count + other_count


@strict
def _float64_moments(x, valid, count, left, right, c, channels, inner, top, bottom):
    """`(mean, m2)` of channel `c` of a tile, in float64: for values with which float32 fails."""
    mean = 0.0
    for _ in range(2):  # around 0, then around the mean: the corrected two-pass algorithm
        first = 0.0
        second = 0.0
        for r in range(top, bottom):
            if not kept(valid, r):
                continue
            for begin in range(left + c * inner, right, channels * inner):
                for i in range(begin, begin + inner):
                    d = np.float64(widen(x[r, i])) - mean
                    first += d
                    second += d * d
        correction = first / count
        mean += correction
    return mean, max(second - correction * first, 0.0 * second)


@strict
def part_moments(x, valid, part, inner, height, lines, numbers, mean, m2):
    """Write the moments of a part to its channels of `mean`, `m2`; returns the count.

    Each tile of the part is computed as in `planes`.
    """
    top, bottom, left, right, low, high = part
    mean, m2 = mean[low:high], m2[low:high]
    width, channels = right - left, high - low
    first, second, shift = lines[0, :width], lines[1, :width], lines[2, :width]
    sums, squares = numbers[0, :channels], numbers[1, :channels]
    tile_mean, tile_m2 = numbers[2, :channels], numbers[3, :channels]
    first[:] = 0
    second[:] = 0
    count = 0.0
    for begin in range(top, bottom, height):
        end = min(bottom, begin + height)
        n = np.float64(kept_of(valid, begin, end) * (width // channels))
        if n == 0:
            continue
        _add(x, valid, left, right, begin, end, first)
        sums[:] = 0.0
        squares[:] = 0.0
        sum_columns(first, inner, sums)
        for c in range(channels):
            tile_mean[c] = rounded(sums[c] / n, x)
            sums[c] = 0.0
        fill_columns(tile_mean, inner, shift)
        _add_deviations(x, valid, left, right, begin, end, shift, first, second)
        sum_columns(first, inner, sums)
        sum_columns(second, inner, squares)
        failed = 0
        for c in range(channels):
            correction = sums[c] / n
            tile_mean[c] += correction
            tile_m2[c] = max(squares[c] - correction * sums[c], 0.0 * squares[c])  # NaN stays
            failed += float32_fails(sums[c], squares[c], n, x)
        if failed:
            for c in range(channels):
                if float32_fails(sums[c], squares[c], n, x):
                    tile_mean[c], tile_m2[c] = _float64_moments(
                        x, valid, n, left, right, c, channels, inner, begin, end
                    )
        count = _merge_in(count, mean, m2, n, tile_mean, tile_m2)
    return count


@strict
def merge_chunks(counts, means, m2s, low, high, mean, m2):
    """Merge the moments of the chunks, in their order, for the channels `low` to `high`."""
    count = 0.0
    for k in range(counts.shape[0]):
        if counts[k]:
            count = _merge_in(
                count, mean[low:high], m2[low:high], counts[k], means[k, low:high], m2s[k, low:high]
            )


@strict
def _fill_power_and_centre(x, mean, invstd, inner, numbers, power, centre):
    """Write `power` and `centre` of all columns; returns `(powers, same_power)`.

    `powers`: the power per channel. One power serves all channels of the part, and `power` stays
    unwritten, unless their deviations differ by more than 1e6.
    """
    channels = mean.shape[0]
    powers, centres = numbers[0, :channels], numbers[1, :channels]
    least, most = np.inf, 0.0
    for c in range(channels):
        powers[c] = power_of(invstd[c], rounded(mean[c], x))
        least, most = min(least, powers[c]), max(most, powers[c])
    same_power = most <= least * 2.0**20
    if same_power:
        powers[:] = least
    else:
        fill_columns(powers, inner, power)
    for c in range(channels):
        centres[c] = np.float64(rounded(mean[c], x)) * powers[c]
    fill_columns(centres, inner, centre)
    return powers, same_power


@strict
def _fill_affine(x, mean, invstd, weight, bias, powers, inner, numbers, scale, shift):
    """Write `scale` and `shift` of all columns; `powers` as from `_fill_power_and_centre`."""
    channels = mean.shape[0]
    scales, shifts = numbers[2, :channels], numbers[3, :channels]
    for c in range(channels):
        scales[c], shifts[c] = affine_coefficients(
            mean[c], rounded(mean[c], x), invstd[c], value_or(weight, c, 1.0), powers[c]
        )
    if bias.shape[0]:
        for c in range(channels):
            shifts[c] += bias[c]
    fill_columns(scales, inner, scale)
    fill_columns(shifts, inner, shift)


@strict
def part_products(
    x, dy, part, inner, height, mean, invstd, weight, bias, act, valid, lines, numbers, sum_dy,
    sum_dy_x,
):  # fmt: skip
    """Write `sum(dz)`, `sum(dz * (x - rounded_mean))` of a part to its channels of the last two."""
    top, bottom, left, right, low, high = part
    mean, invstd = mean[low:high], invstd[low:high]
    sum_dy, sum_dy_x = sum_dy[low:high], sum_dy_x[low:high]
    width = right - left
    power, centre = lines[0, :width], lines[1, :width]
    first, second = lines[2, :width], lines[3, :width]
    scale, shift = lines[4, :width], lines[5, :width]
    powers, same_power = _fill_power_and_centre(x, mean, invstd, inner, numbers, power, centre)
    if act is not None:
        weight, bias = weight[low:high], bias[low:high]
        _fill_affine(x, mean, invstd, weight, bias, powers, inner, numbers, scale, shift)
    one_power = rounded(powers[0], x)
    first[:] = 0
    second[:] = 0
    sum_dy[:] = 0.0
    sum_dy_x[:] = 0.0
    for begin in range(top, bottom, height):
        end = min(bottom, begin + height)
        if same_power:
            _add_products(
                x, dy, valid, left, right, begin, end, act, one_power, centre, scale, shift, first,
                second,
            )  # fmt: skip
        else:
            _add_products(
                x, dy, valid, left, right, begin, end, act, power, centre, scale, shift, first,
                second,
            )  # fmt: skip
        sum_columns(first, inner, sum_dy)
        sum_columns(second, inner, sum_dy_x)
    for c in range(high - low):
        sum_dy_x[c] /= powers[c]


@strict
def add_chunks(x, sums_dy, sums_dy_x, low, high, mean, invstd, sum_dy, sum_dy_xhat):
    """Add what `part_products` wrote for each chunk, in order, for the channels `low` to `high`."""
    first, second = sum_dy[low:high], sum_dy_xhat[low:high]
    first[:] = 0.0
    second[:] = 0.0
    for k in range(sums_dy.shape[0]):
        chunk_first, chunk_second = sums_dy[k, low:high], sums_dy_x[k, low:high]
        for c in range(high - low):
            first[c] += chunk_first[c]
            second[c] += chunk_second[c]
    for c in range(low, high):
        rounded_mean = rounded(mean[c], x)
        sum_dy_xhat[c] = xhat_sum(sum_dy[c], sum_dy_xhat[c], mean[c], rounded_mean, invstd[c])


# ------------------------------------------------------------------- maps of one part


@strict
def part_normalize(x, part, inner, mean, invstd, weight, bias, act, valid, lines, numbers, y):
    """Write `y` of a part."""
    top, bottom, left, right, low, high = part
    mean, invstd = mean[low:high], invstd[low:high]
    weight, bias = weight[low:high], bias[low:high]
    width = right - left
    power, centre = lines[0, :width], lines[1, :width]
    scale, shift = lines[2, :width], lines[3, :width]
    powers, same_power = _fill_power_and_centre(x, mean, invstd, inner, numbers, power, centre)
    _fill_affine(x, mean, invstd, weight, bias, powers, inner, numbers, scale, shift)
    one_power = rounded(powers[0], x)
    for r in range(top, bottom):
        source, target = x[r, left:right], y[r, left:right]
        if not kept(valid, r):
            target[:] = 0
        elif same_power:
            _affine(source, act, one_power, centre, scale, shift, target)
        else:
            _affine(source, act, power, centre, scale, shift, target)


@strict
def part_gradient(
    x, dy, part, inner, mean, invstd, weight, bias, act, valid, mean_dy, mean_dy_xhat, lines,
    numbers, dx,
):  # fmt: skip
    """Write `dx` of a part."""
    top, bottom, left, right, low, high = part
    mean, invstd = mean[low:high], invstd[low:high]
    weight, bias = weight[low:high], bias[low:high]
    mean_dy, mean_dy_xhat = mean_dy[low:high], mean_dy_xhat[low:high]
    width, channels = right - left, high - low
    power, centre, of_dy = lines[0, :width], lines[1, :width], lines[2, :width]
    of_x, shift, scale, of_z = (
        lines[3, :width], lines[4, :width], lines[5, :width], lines[6, :width]
    )  # fmt: skip
    of_dys, of_xs = numbers[2, :channels], numbers[3, :channels]
    shifts = numbers[4, :channels]
    powers, same_power = _fill_power_and_centre(x, mean, invstd, inner, numbers, power, centre)
    if act is not None:
        _fill_affine(x, mean, invstd, weight, bias, powers, inner, numbers, scale, of_z)
    for c in range(channels):
        of_dys[c], of_xs[c], shifts[c] = gradient_coefficients(
            mean[c], rounded(mean[c], x), invstd[c], value_or(weight, c, 1.0),
            mean_dy[c], mean_dy_xhat[c], powers[c],
        )  # fmt: skip
    fill_columns(of_dys, inner, of_dy)
    fill_columns(of_xs, inner, of_x)
    fill_columns(shifts, inner, shift)
    one_power = rounded(powers[0], x)
    for r in range(top, bottom):
        source, grad, target = x[r, left:right], dy[r, left:right], dx[r, left:right]
        if not kept(valid, r):
            target[:] = 0
        elif same_power:
            _gradient(source, grad, act, one_power, centre, scale, of_z, of_dy, of_x, shift, target)
        else:
            _gradient(source, grad, act, power, centre, scale, of_z, of_dy, of_x, shift, target)
