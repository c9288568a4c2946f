"""The formulas of step.c over a list of tensors, in Triton.

Each kernel computes what the loop in the paper's Python file computes.

Tensors are cut into chunks of a fixed size, one program each, and chunks into blocks. Two tables
say where the tensors are and which scalars they have. Sums are added in float64, lane by lane, then
chunk by chunk, without atomics, in an order that depends only on sizes, and no launch is tuned: the
same input gives the same bits. LAMB needs its direction twice, for the norm and for the update, and
computes it twice, as MARS does its corrected gradient: that moves fewer bytes than storing it, and
takes no memory.

All kernels have the same arguments, see `_locate_chunk`, and the same shape: read the scalars, then
loop over the whole blocks of the chunk (MASKED 0), and over the rest, a shorter block that is
loaded and stored with a mask (MASKED 1). In a block w are the weights, g the gradients, and
`exp_avg`, `exp_avg_sq` and so on the new moments; their plurals are pointers. weight1 is 1 - beta1,
as in torch.lerp. keep is what decoupled decay leaves of a weight. correction1 is 1 / (1 - beta1^t)
and correction2 is 1 / sqrt(1 - beta2^t); in a row of scalars they are called `first` and `root`.

Triton needs the objects in annotations, so these are not postponed in this file.
"""

import torch
import triton
import triton.language as tl

from optrun.optimizer.kernels.rows import SCALARS

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on the CPU: TRITON_INTERPRET=1 as this file was
imported."""
DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
CHUNK = 8192
"""Elements of a program."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Options of every launch.

The number of warps is fixed because the order of sums depends on it. Multiply-adds are not fused,
as in step.c.
"""

MOST_STATES = 3
"""Kinds of state that a formula has at most."""
TENSOR_FIELDS = ("params", "firsts", "seconds", "thirds", "size", "chunks")
"""Entries for each tensor: addresses of the parameter and of three kinds of state, number of
elements, index of its first chunk."""
TWO_PASSES = {"lamb": ("lamb_moments", "lamb_update"), "mars": ("mars_norm", "mars_update")}
"""Formulas that need a norm of a whole tensor before they can move a weight."""

# Triton takes constants of a file only as these.
_CHUNK = tl.constexpr(CHUNK)
_BLOCK = tl.constexpr(1024)
"""Elements of a program at once."""
_TENSOR_FIELDS = tl.constexpr(len(TENSOR_FIELDS))
_SCALARS = tl.constexpr(len(SCALARS))
_PARAMS, _FIRSTS, _SECONDS, _THIRDS, _SIZE, _CHUNKS = map(tl.constexpr, range(len(TENSOR_FIELDS)))
# Index of each scalar in a row, in the order of `rows.SCALARS`, which explains them. There the step
# size is `scale`, and the corrections are `first` and `root`.
(
    _STEP_SIZE,
    _KEEP,
    _BETA1,
    _BETA2,
    _EPS,
    _EPS_GRADIENT,
    _EPS_DENOMINATOR,
    _CORRECTION2,
    _CORRECTION1,
    _L1,
    _L2,
    _DECAY,
    _UNSCALE,
    _ADAPT,
    _NESTEROV,
    _MIN_NORM,
    _MAX_NORM,
    _EPS_RATIO,
    _MIN_RATIO,
    _MAX_RATIO,
    _BETA3,
    _ALPHA,
    _RATE,
    _MIX,
    _STRENGTH,
) = map(tl.constexpr, range(len(SCALARS)))


@triton.jit
def _pointer(entry, begin, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(entry).to(tl.pointer_type(DTYPE)) + begin
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _locate_chunk(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return where a program finds its scalars, its number of elements, and its tensors.

    Scalars and tensors are pointers, the latter to the program's chunk of the parameter, of the
    gradient and of three kinds of state. A kind that a formula does not have has address 0, and
    nothing loads it. If `found_inf`, the first of `scalar_table`, is set, the chunk has 0 elements,
    so that nothing is stored.

    Args:
        tensor_table: A row of `TENSOR_FIELDS` for each tensor.
        grad_addresses: Address of each gradient.
        row_of: For each tensor the row of its scalars in `scalar_table`.
        scalar_table: `found_inf`, then rows of `SCALARS`, in float64.
        chunks: For each program its tensor and its first element there.
        DTYPE: Type of the tensors.
        ALIGNED: Whether all addresses are multiples of 16 bytes.
    """
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1)
    entry = tensor_table + tensor * _TENSOR_FIELDS
    # `found_inf` comes before the rows.
    scalars = scalar_table + 1 + tl.load(row_of + tensor) * _SCALARS
    # The last chunk of a tensor may be shorter; with `found_inf` none has an element.
    size = tl.minimum(tl.load(entry + _SIZE) - begin, _CHUNK)
    size = tl.where(tl.load(scalar_table) != 0, 0, size)
    params = _pointer(entry + _PARAMS, begin, DTYPE, ALIGNED)
    grads = _pointer(grad_addresses + tensor, begin, DTYPE, ALIGNED)
    first_states = _pointer(entry + _FIRSTS, begin, DTYPE, ALIGNED)
    second_states = _pointer(entry + _SECONDS, begin, DTYPE, ALIGNED)
    third_states = _pointer(entry + _THIRDS, begin, DTYPE, ALIGNED)
    return scalars, size, params, grads, first_states, second_states, third_states


@triton.jit
def _block_range(size, MASKED: tl.constexpr):
    """Return begin and end of the whole blocks; if `MASKED`, of the elements after them.

    With 2500 elements in blocks of 1024: (0, 2048), and if `MASKED` (2048, 2500).
    """
    in_blocks = size // _BLOCK * _BLOCK
    return in_blocks * MASKED, in_blocks + (size - in_blocks) * MASKED


@triton.jit
def _scalar(number, DTYPE: tl.constexpr):
    return tl.load(number).to(DTYPE)


@triton.jit
def _beta(number, DTYPE: tl.constexpr):
    """Return the decay beta of a moment, and 1 - beta, subtracted in float64."""
    beta = tl.load(number)
    return beta.to(DTYPE), (1 - beta).to(DTYPE)


@triton.jit
def _betas(scalars, DTYPE: tl.constexpr):
    """Return beta1, 1 - beta1, beta2 and 1 - beta2 from the scalars of a tensor."""
    beta1, weight1 = _beta(scalars + _BETA1, DTYPE)
    beta2, weight2 = _beta(scalars + _BETA2, DTYPE)
    return beta1, weight1, beta2, weight2


@triton.jit
def _load(
    pointer, offsets, size, MASKED: tl.constexpr
):  # with a mask a whole block would not be loaded as vectors
    if MASKED:
        return tl.load(pointer + offsets, mask=offsets < size, other=0.0)
    return tl.load(pointer + offsets)


@triton.jit
def _store(pointer, offsets, value, size, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointer + offsets, value, mask=offsets < size)
    else:
        tl.store(pointer + offsets, value)


@triton.jit
def _sqrt(x):  # rounded correctly, as on a CPU; in float64 it always is
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    return tl.sqrt(x)


@triton.jit
def _divide(x, y):
    if x.dtype == tl.float32:
        return tl.div_rn(x, y)
    return x / y


@triton.jit
def _lerp(a, b, beta, weight):
    # beta a + weight b, for a beta of 1 - weight; exact where a is b and where beta is 0.
    return tl.where(weight < 0.5, a + weight * (b - a), b - beta * (b - a))


@triton.jit
def _bounded(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(x.dtype)


@triton.jit
def _add_coupled_decay(g, w, l1, l2):
    g = tl.where(l2 != 0, g + l2 * w, g)
    return tl.where(l1 != 0, tl.where(w > 0, g + l1, tl.where(w < 0, g - l1, g)), g)


@triton.jit
def _update_moments(
    exp_avgs, exp_avg_sqs, offsets, g, beta1, weight1, beta2, weight2, size, MASKED: tl.constexpr
):
    """Update the first and second moment of a block in place, and return both.

    exp_avg = beta1 exp_avg + weight1 g and exp_avg_sq = beta2 exp_avg_sq + weight2 g g, where
    weight1 is 1 - beta1 and weight2 is 1 - beta2.
    """
    exp_avg = _lerp(_load(exp_avgs, offsets, size, MASKED), g, beta1, weight1)
    exp_avg_sq = beta2 * _load(exp_avg_sqs, offsets, size, MASKED) + weight2 * g * g
    _store(exp_avgs, offsets, exp_avg, size, MASKED)
    _store(exp_avg_sqs, offsets, exp_avg_sq, size, MASKED)
    return exp_avg, exp_avg_sq


@triton.jit
def adam(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute `adam_update._single_tensor_adam` for one chunk of a tensor.

        g = unscale g + l2 w
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = keep w - step_size m / (correction2 sqrt(v) + eps)

    With `nesterov` the last line has beta1 m + (1 - beta1) g in place of m. For the scalars see
    `rows.adam_row`.
    """
    # Of this program's chunk: the scalars of its tensor, its length, and pointers to its values.
    scalars, size, params, grads, exp_avgs, exp_avg_sqs, _ = _locate_chunk(
        tensor_table, grad_addresses, row_of, scalar_table, chunks, DTYPE, ALIGNED
    )
    beta1, weight1, beta2, weight2 = _betas(scalars, DTYPE)  # weight1 is 1 - beta1
    step_size = _scalar(scalars + _STEP_SIZE, DTYPE)
    keep = _scalar(scalars + _KEEP, DTYPE)
    correction2 = _scalar(scalars + _CORRECTION2, DTYPE)
    eps = _scalar(scalars + _EPS, DTYPE)
    l2 = _scalar(scalars + _L2, DTYPE)
    unscale = _scalar(scalars + _UNSCALE, DTYPE)
    nesterov = tl.load(scalars + _NESTEROV)
    # The whole blocks of the chunk (MASKED 0), then the shorter rest (MASKED 1).
    for MASKED in tl.static_range(2):
        start, stop = _block_range(size, MASKED)
        for block in range(start, stop, _BLOCK):
            offsets = block + tl.arange(0, _BLOCK)
            w = _load(params, offsets, size, MASKED)
            g = _load(grads, offsets, size, MASKED) * unscale
            g = tl.where(l2 != 0, g + l2 * w, g)
            exp_avg, exp_avg_sq = _update_moments(
                exp_avgs, exp_avg_sqs, offsets, g, beta1, weight1, beta2, weight2, size, MASKED
            )
            direction = tl.where(nesterov != 0, _lerp(exp_avg, g, beta1, weight1), exp_avg)
            step = step_size * _divide(direction, _sqrt(exp_avg_sq) * correction2 + eps)
            _store(params, offsets, keep * w - step, size, MASKED)


@triton.jit
def adamax(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute `adamax._single_tensor_adamax` for one chunk of a tensor.

    u = max(beta2 u + eps, |g| + eps_gradient), then
    w = keep w - step_size m / (u + eps_denominator); two of the three eps are 0.
    """
    # Of this program's chunk: the scalars of its tensor, its length, and pointers to its values.
    scalars, size, params, grads, exp_avgs, exp_infs, _ = _locate_chunk(
        tensor_table, grad_addresses, row_of, scalar_table, chunks, DTYPE, ALIGNED
    )
    beta1, weight1 = _beta(scalars + _BETA1, DTYPE)  # weight1 is 1 - beta1
    beta2 = _scalar(scalars + _BETA2, DTYPE)
    step_size = _scalar(scalars + _STEP_SIZE, DTYPE)
    keep = _scalar(scalars + _KEEP, DTYPE)
    l1 = _scalar(scalars + _L1, DTYPE)
    l2 = _scalar(scalars + _L2, DTYPE)
    eps = _scalar(scalars + _EPS, DTYPE)
    eps_gradient = _scalar(scalars + _EPS_GRADIENT, DTYPE)
    eps_denominator = _scalar(scalars + _EPS_DENOMINATOR, DTYPE)
    # The whole blocks of the chunk (MASKED 0), then the shorter rest (MASKED 1).
    for MASKED in tl.static_range(2):
        start, stop = _block_range(size, MASKED)
        for block in range(start, stop, _BLOCK):
            offsets = block + tl.arange(0, _BLOCK)
            w = _load(params, offsets, size, MASKED)
            g = _add_coupled_decay(_load(grads, offsets, size, MASKED), w, l1, l2)
            exp_avg = _lerp(_load(exp_avgs, offsets, size, MASKED), g, beta1, weight1)
            largest = tl.abs(g) + eps_gradient
            decayed = beta2 * _load(exp_infs, offsets, size, MASKED) + eps
            largest = tl.where(
                (decayed > largest) | (decayed != decayed), decayed, largest
            )  # NaN goes before every number
            _store(exp_avgs, offsets, exp_avg, size, MASKED)
            _store(exp_infs, offsets, largest, size, MASKED)
            step = step_size * _divide(exp_avg, largest + eps_denominator)
            _store(params, offsets, keep * w - step, size, MASKED)


@triton.jit
def _adam_direction(exp_avg, exp_avg_sq, w, correction1, correction2, eps, decay):
    # correction1 m / (correction2 sqrt(v) + eps) + decay w
    adam = _divide(exp_avg * correction1, _sqrt(exp_avg_sq) * correction2 + eps)
    return tl.where(decay != 0, adam + decay * w, adam)


@triton.jit
def _store_sums(sums, param_squares, update_squares):
    """Store the two sums of this program's chunk."""
    sums_of_chunk = sums + 2 * tl.program_id(0)
    tl.store(sums_of_chunk, param_squares)
    tl.store(sums_of_chunk + 1, update_squares)


@triton.jit
def lamb_moments(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    sums,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Update the moments of a chunk for LAMB, and sum the squares for its norms.

    `sums` gets two numbers for each chunk: the sum of squared weights w, and of squared directions
    r = correction1 m / (correction2 sqrt(v) + eps) + decay w, see `lamb._single_tensor_lamb`. The
    weights do not change yet: `set_ratios` makes |w| / |r| of the sums, and `lamb_update` follows.
    """
    # Of this program's chunk: the scalars of its tensor, its length, and pointers to its values.
    scalars, size, params, grads, exp_avgs, exp_avg_sqs, _ = _locate_chunk(
        tensor_table, grad_addresses, row_of, scalar_table, chunks, DTYPE, ALIGNED
    )
    beta1, weight1, beta2, weight2 = _betas(scalars, DTYPE)  # weight1 is 1 - beta1
    l1 = _scalar(scalars + _L1, DTYPE)
    l2 = _scalar(scalars + _L2, DTYPE)
    correction2 = _scalar(scalars + _CORRECTION2, DTYPE)
    correction1 = _scalar(scalars + _CORRECTION1, DTYPE)
    eps = _scalar(scalars + _EPS, DTYPE)
    decay = _scalar(scalars + _DECAY, DTYPE)
    # One sum for each place in a block, in float64; they are added up at the end.
    param_squares = tl.full((_BLOCK,), 0.0, tl.float64)
    update_squares = tl.full((_BLOCK,), 0.0, tl.float64)
    # The whole blocks of the chunk (MASKED 0), then the shorter rest (MASKED 1).
    for MASKED in tl.static_range(2):
        start, stop = _block_range(size, MASKED)
        for block in range(start, stop, _BLOCK):
            offsets = block + tl.arange(0, _BLOCK)
            w = _load(params, offsets, size, MASKED)
            g = _add_coupled_decay(_load(grads, offsets, size, MASKED), w, l1, l2)
            exp_avg, exp_avg_sq = _update_moments(
                exp_avgs, exp_avg_sqs, offsets, g, beta1, weight1, beta2, weight2, size, MASKED
            )
            direction = _adam_direction(
                exp_avg, exp_avg_sq, w, correction1, correction2, eps, decay
            )
            if MASKED:  # past the end all is 0, and with an eps of 0 the direction is 0 / 0
                direction = tl.where(offsets < size, direction, 0.0)
            param_squares += w.to(tl.float64) * w.to(tl.float64)
            update_squares += direction.to(tl.float64) * direction.to(tl.float64)
    _store_sums(sums, tl.sum(param_squares, axis=0), tl.sum(update_squares, axis=0))


@triton.jit
def set_ratios(
    tensor_table,
    row_of,
    scalar_table,
    sums,
    ratios,
    DTYPE: tl.constexpr,
):
    """Compute the trust ratio of one tensor, from the sums of its chunks, into `ratios`.

    One program for each tensor:

        ratio = |keep w| / (|r| + eps_ratio)

    with |keep w| between `min_norm` and `max_norm`, and the ratio between `min_ratio` and
    `max_ratio`; r is the direction. It is 1 if the scalar `adapt` is 0, if a norm is 0, or if |r|
    is NaN. For MARS r is the corrected gradient c; both bounds of the first norm are 1, and so is
    `max_ratio`: the ratio is 1 / |c|, at most 1.

    Arguments as in `_locate_chunk`; `sums` has two numbers for each chunk, see `lamb_moments`.
    """
    tensor = tl.program_id(0)
    # 1. Find the scalars of the tensor, and the sums of its chunks.
    entry = tensor_table + tensor * _TENSOR_FIELDS
    scalars = scalar_table + 1 + tl.load(row_of + tensor) * _SCALARS
    chunks = (tl.load(entry + _SIZE) + _CHUNK - 1) // _CHUNK  # rounded up
    first_sum = sums + 2 * tl.load(entry + _CHUNKS)  # of the tensor's first chunk
    # 2. Add the sums of all chunks: the even ones are of weights, the odd ones of directions.
    param_squares = tl.full((_BLOCK,), 0.0, tl.float64)
    update_squares = tl.full((_BLOCK,), 0.0, tl.float64)
    for start in range(0, chunks, _BLOCK):
        offsets = start + tl.arange(0, _BLOCK)
        param_squares += tl.load(first_sum + 2 * offsets, mask=offsets < chunks, other=0.0)
        update_squares += tl.load(first_sum + 2 * offsets + 1, mask=offsets < chunks, other=0.0)
    # 3. Compute the ratio. The weights were summed before they decayed: |keep w| = |keep| |w|.
    param_norm = tl.abs(tl.load(scalars + _KEEP)) * tl.sqrt(tl.sum(param_squares, axis=0))
    param_norm = _bounded(param_norm, tl.load(scalars + _MIN_NORM), tl.load(scalars + _MAX_NORM))
    update_norm = tl.sqrt(tl.sum(update_squares, axis=0))
    adapted = (tl.load(scalars + _ADAPT) != 0) & (param_norm > 0) & (update_norm > 0)
    # Divided by 1 in place of 0 if the ratio is not used.
    ratio = param_norm / tl.where(adapted, update_norm + tl.load(scalars + _EPS_RATIO), 1.0)
    ratio = _bounded(ratio, tl.load(scalars + _MIN_RATIO), tl.load(scalars + _MAX_RATIO))
    tl.store(ratios + tensor, tl.where(adapted, ratio, 1.0).to(DTYPE))


@triton.jit
def lamb_update(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    ratios,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Move the weights of a chunk for LAMB: w = keep w - lr ratio direction.

    The direction is computed again, from the moments that `lamb_moments` stored. The ratio of the
    tensor is that of `set_ratios`.
    """
    # Of this program's chunk: the scalars of its tensor, its length, and pointers to its values.
    scalars, size, params, _, exp_avgs, exp_avg_sqs, _ = _locate_chunk(
        tensor_table, grad_addresses, row_of, scalar_table, chunks, DTYPE, ALIGNED
    )
    keep = _scalar(scalars + _KEEP, DTYPE)
    eps = _scalar(scalars + _EPS, DTYPE)
    correction2 = _scalar(scalars + _CORRECTION2, DTYPE)
    correction1 = _scalar(scalars + _CORRECTION1, DTYPE)
    decay = _scalar(scalars + _DECAY, DTYPE)
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    step_size = (tl.load(scalars + _STEP_SIZE) * tl.load(ratios + tensor)).to(DTYPE)
    # The whole blocks of the chunk (MASKED 0), then the shorter rest (MASKED 1).
    for MASKED in tl.static_range(2):
        start, stop = _block_range(size, MASKED)
        for block in range(start, stop, _BLOCK):
            offsets = block + tl.arange(0, _BLOCK)
            w = _load(params, offsets, size, MASKED)
            exp_avg = _load(exp_avgs, offsets, size, MASKED)
            direction = _adam_direction(
                exp_avg,
                _load(exp_avg_sqs, offsets, size, MASKED),
                w,
                correction1,
                correction2,
                eps,
                decay,
            )
            _store(params, offsets, keep * w - step_size * direction, size, MASKED)


@triton.jit
def lion(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute `lion._single_tensor_lion` for one chunk of a tensor.

    w = keep w - step_size sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g.
    """
    # Of this program's chunk: the scalars of its tensor, its length, and pointers to its values.
    scalars, size, params, grads, exp_avgs, _, _ = _locate_chunk(
        tensor_table, grad_addresses, row_of, scalar_table, chunks, DTYPE, ALIGNED
    )
    beta1, weight1, beta2, weight2 = _betas(scalars, DTYPE)  # weight1 is 1 - beta1
    step_size = _scalar(scalars + _STEP_SIZE, DTYPE)
    keep = _scalar(scalars + _KEEP, DTYPE)
    # The whole blocks of the chunk (MASKED 0), then the shorter rest (MASKED 1).
    for MASKED in tl.static_range(2):
        start, stop = _block_range(size, MASKED)
        for block in range(start, stop, _BLOCK):
            offsets = block + tl.arange(0, _BLOCK)
            w = _load(params, offsets, size, MASKED)
            g = _load(grads, offsets, size, MASKED)
            exp_avg = _load(exp_avgs, offsets, size, MASKED)
            step = step_size * _sign(_lerp(exp_avg, g, beta1, weight1))
            _store(params, offsets, keep * w - step, size, MASKED)
            _store(exp_avgs, offsets, _lerp(exp_avg, g, beta2, weight2), size, MASKED)


@triton.jit
def schedule_free(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute `schedule_free._single_tensor_schedule_free` for one chunk of a tensor.

    d = g / (correction2 sqrt(v) + eps) + decay w, then w = (1 - mix) w + mix z - step_size d, and
    z = z - rate d.
    """
    # Of this program's chunk: the scalars of its tensor, its length, and pointers to its values.
    scalars, size, params, grads, zs, exp_avg_sqs, _ = _locate_chunk(
        tensor_table, grad_addresses, row_of, scalar_table, chunks, DTYPE, ALIGNED
    )
    beta2, weight2 = _beta(scalars + _BETA2, DTYPE)
    correction2 = _scalar(scalars + _CORRECTION2, DTYPE)
    eps = _scalar(scalars + _EPS, DTYPE)
    step_size = _scalar(scalars + _STEP_SIZE, DTYPE)
    decay = _scalar(scalars + _DECAY, DTYPE)
    rate = _scalar(scalars + _RATE, DTYPE)
    mix, mix_weight = _beta(scalars + _MIX, DTYPE)  # mix_weight is 1 - mix
    # The whole blocks of the chunk (MASKED 0), then the shorter rest (MASKED 1).
    for MASKED in tl.static_range(2):
        start, stop = _block_range(size, MASKED)
        for block in range(start, stop, _BLOCK):
            offsets = block + tl.arange(0, _BLOCK)
            w = _load(params, offsets, size, MASKED)
            g = _load(grads, offsets, size, MASKED)
            z = _load(zs, offsets, size, MASKED)
            exp_avg_sq = beta2 * _load(exp_avg_sqs, offsets, size, MASKED) + weight2 * g * g
            # With the gradient in place of a moment, which needs no correction.
            direction = _adam_direction(g, exp_avg_sq, w, 1.0, correction2, eps, decay)
            _store(exp_avg_sqs, offsets, exp_avg_sq, size, MASKED)
            _store(
                params, offsets, _lerp(w, z, mix_weight, mix) - step_size * direction, size, MASKED
            )
            _store(zs, offsets, z - rate * direction, size, MASKED)


@triton.jit
def ademamix(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute `ademamix._single_tensor_ademamix` for one chunk of a tensor.

        m1 = beta1 m1 + (1 - beta1) g, and so m2 by beta3
        v = beta2 v + (1 - beta2) g^2
        w = keep w - step_size (correction1 m1 + alpha m2) / (correction2 sqrt(v) + eps)

    m1 is `exp_avg`, m2 `exp_avg_slow`, and v `exp_avg_sq`. For the scalars see `ademamix_row`.
    """
    # Of this program's chunk: the scalars of its tensor, its length, and pointers to its values.
    scalars, size, params, grads, exp_avgs, exp_avg_slows, exp_avg_sqs = _locate_chunk(
        tensor_table, grad_addresses, row_of, scalar_table, chunks, DTYPE, ALIGNED
    )
    beta1, weight1, beta2, weight2 = _betas(scalars, DTYPE)  # weight1 is 1 - beta1
    beta3, weight3 = _beta(scalars + _BETA3, DTYPE)
    step_size = _scalar(scalars + _STEP_SIZE, DTYPE)
    keep = _scalar(scalars + _KEEP, DTYPE)
    correction2 = _scalar(scalars + _CORRECTION2, DTYPE)
    eps = _scalar(scalars + _EPS, DTYPE)
    correction1 = _scalar(scalars + _CORRECTION1, DTYPE)
    alpha = _scalar(scalars + _ALPHA, DTYPE)
    # The whole blocks of the chunk (MASKED 0), then the shorter rest (MASKED 1).
    for MASKED in tl.static_range(2):
        start, stop = _block_range(size, MASKED)
        for block in range(start, stop, _BLOCK):
            offsets = block + tl.arange(0, _BLOCK)
            w = _load(params, offsets, size, MASKED)
            g = _load(grads, offsets, size, MASKED)
            exp_avg_slow = _lerp(_load(exp_avg_slows, offsets, size, MASKED), g, beta3, weight3)
            exp_avg, exp_avg_sq = _update_moments(
                exp_avgs, exp_avg_sqs, offsets, g, beta1, weight1, beta2, weight2, size, MASKED
            )
            _store(exp_avg_slows, offsets, exp_avg_slow, size, MASKED)
            mixed = exp_avg * correction1 + alpha * exp_avg_slow
            step = step_size * _divide(mixed, _sqrt(exp_avg_sq) * correction2 + eps)
            _store(params, offsets, keep * w - step, size, MASKED)


@triton.jit
def mars_norm(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    sums,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Sum the squared corrected gradients of a chunk for MARS; 0 for a tensor without correction.

    `sums` gets two numbers for each chunk, as from `lamb_moments`: 0 and this sum. The corrected
    gradient is c = g + strength (g - g'), with the gradient g' of the step before; that is
    -strength g' + (1 + strength) g.
    """
    scalars, size, _, grads, _, _, last_grads = _locate_chunk(
        tensor_table, grad_addresses, row_of, scalar_table, chunks, DTYPE, ALIGNED
    )
    strength = tl.load(scalars + _STRENGTH)
    one_plus_strength = (1 + strength).to(DTYPE)  # added in float64, as 1 - beta is subtracted
    strength = strength.to(DTYPE)
    size = tl.where(tl.load(scalars + _ADAPT) != 0, size, 0)  # nothing to sum without correction
    squares = tl.full((_BLOCK,), 0.0, tl.float64)
    # The whole blocks of the chunk (MASKED 0), then the shorter rest (MASKED 1).
    for MASKED in tl.static_range(2):
        start, stop = _block_range(size, MASKED)
        for block in range(start, stop, _BLOCK):
            offsets = block + tl.arange(0, _BLOCK)
            g = _load(grads, offsets, size, MASKED)
            # An interpolation beyond g; past the end all is 0, so that the sum stays.
            c = _lerp(_load(last_grads, offsets, size, MASKED), g, -strength, one_plus_strength)
            squares += c.to(tl.float64) * c.to(tl.float64)
    # In the dtype of the tensors, so that it is infinite where it is to the loop.
    total = tl.sum(squares, axis=0).to(DTYPE)
    _store_sums(sums, tl.full((), 0.0, tl.float64), total.to(tl.float64))


@triton.jit
def mars_update(
    tensor_table,
    grad_addresses,
    row_of,
    scalar_table,
    chunks,
    ratios,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute `mars._single_tensor_mars` for one chunk of a tensor, once its norm is known.

        c = ratio (g + strength (g - g')) if the scalar `adapt` is not 0, else g
        m = beta1 m + (1 - beta1) c
        v = beta2 v + (1 - beta2) c^2
        w = keep w - step_size m / (correction2 sqrt(v) + eps)
        g' = g, for the next step

    The ratio of the tensor is that of `set_ratios`. For the scalars see `rows.mars_row`;
    `step_size` has the bias correction of m.
    """
    # Of this program's chunk: the scalars of its tensor, its length, and pointers to its values.
    scalars, size, params, grads, exp_avgs, exp_avg_sqs, last_grads = _locate_chunk(
        tensor_table, grad_addresses, row_of, scalar_table, chunks, DTYPE, ALIGNED
    )
    beta1, weight1, beta2, weight2 = _betas(scalars, DTYPE)  # weight1 is 1 - beta1
    step_size = _scalar(scalars + _STEP_SIZE, DTYPE)
    keep = _scalar(scalars + _KEEP, DTYPE)
    correction2 = _scalar(scalars + _CORRECTION2, DTYPE)
    eps = _scalar(scalars + _EPS, DTYPE)
    strength = tl.load(scalars + _STRENGTH)
    one_plus_strength = (1 + strength).to(DTYPE)  # added in float64, as 1 - beta is subtracted
    strength = strength.to(DTYPE)
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    ratio = _scalar(ratios + tensor, DTYPE)
    adapt = tl.load(scalars + _ADAPT) != 0
    # The whole blocks of the chunk (MASKED 0), then the shorter rest (MASKED 1).
    for MASKED in tl.static_range(2):
        start, stop = _block_range(size, MASKED)
        for block in range(start, stop, _BLOCK):
            offsets = block + tl.arange(0, _BLOCK)
            w = _load(params, offsets, size, MASKED)
            g = _load(grads, offsets, size, MASKED)
            # g + strength (g - g') is g' + (1 + strength) (g - g'), an interpolation.
            c = ratio * _lerp(
                _load(last_grads, offsets, size, MASKED), g, -strength, one_plus_strength
            )
            c = tl.where(adapt, c, g)
            exp_avg, exp_avg_sq = _update_moments(
                exp_avgs, exp_avg_sqs, offsets, c, beta1, weight1, beta2, weight2, size, MASKED
            )
            _store(last_grads, offsets, g, size, MASKED)
            step = step_size * _divide(exp_avg, _sqrt(exp_avg_sq) * correction2 + eps)
            _store(params, offsets, keep * w - step, size, MASKED)
