"""The formulas of step.c over a list of tensors, in Triton.

Each kernel computes what the loop in the paper's Python file computes.

Tensors are cut into chunks of a fixed size, one program each, and chunks into blocks. Two tables
say where the tensors are and which scalars they have. Sums are added in float64, lane by lane, then
chunk by chunk, without atomics, in an order that depends only on sizes, and no launch is tuned: the
same input gives the same bits. LAMB needs its direction twice, for the norm and for the update, and
computes it twice, as MARS does its corrected gradient: that moves fewer bytes than storing it, and
takes no memory.

All kernels have the same arguments, see `_job`, and the same shape: read the scalars, then loop
over the whole blocks of the chunk (TAIL 0) and over the block that may be shorter (TAIL 1), which
is loaded and stored with a mask. In a block w are the weights, g the gradients, `first`, `second`
and so on the new moments.

Triton needs the objects in annotations, so these are not postponed in this file.
"""

import torch
import triton
import triton.language as tl

from optrun.optimizer.kernels.rows import SCALARS

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on the CPU: TRITON_INTERPRET=1 as this file was
imported."""
REALS = {torch.float32: tl.float32, torch.float64: tl.float64}
CHUNK = 8192
"""Elements of a program."""
BLOCK = 1024
"""Elements of a program at once."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Options of every launch.

The number of warps is fixed because the order of sums depends on it. Multiply-adds are not fused,
as in step.c.
"""

MOST_STATES = 3
"""Kinds of state that a formula has at most."""
PLACES = ("params", "firsts", "seconds", "thirds", "size", "chunks")
"""Entries for each tensor: addresses of the parameter and of three kinds of state, number of
elements, index of its first chunk."""
TWO_PASSES = {"lamb": ("lamb_moments", "lamb_update"), "mars": ("mars_norm", "mars_update")}
"""Formulas that need a norm of a whole tensor before they can move a weight."""

# Triton takes constants of a file only as these.
_PLACES = tl.constexpr(len(PLACES))
_SCALARS = tl.constexpr(len(SCALARS))
_PARAMS, _FIRSTS, _SECONDS, _THIRDS, _SIZE, _CHUNKS = (
    tl.constexpr(at) for at in range(len(PLACES))
)
_AT = {name: tl.constexpr(at) for at, name in enumerate(SCALARS)}
_SCALE, _KEEP, _ROOT, _FIRST, _UNSCALE = (
    _AT[name] for name in ("scale", "keep", "root", "first", "unscale")
)
_BETA1, _BETA2, _L1, _L2, _DECAY = (_AT[name] for name in ("beta1", "beta2", "l1", "l2", "decay"))
_EPS, _EPS_GRADIENT, _EPS_DENOMINATOR = (
    _AT[name] for name in ("eps", "eps_gradient", "eps_denominator")
)
_BETA3, _ALPHA, _RATE, _MIX, _STRENGTH = (
    _AT[name] for name in ("beta3", "alpha", "rate", "mix", "strength")
)
_ADAPT, _NESTEROV, _EPS_RATIO = (_AT[name] for name in ("adapt", "nesterov", "eps_ratio"))
_MIN_NORM, _MAX_NORM, _MIN_RATIO, _MAX_RATIO = (
    _AT[f"{end}_{of}"] for of in ("norm", "ratio") for end in ("min", "max")
)


@triton.jit
def _pointer(place, begin, REAL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(place).to(tl.pointer_type(REAL)) + begin
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _job(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return a pointer to the scalars of this program's tensor, its elements, and its pointers.

    The pointers are to the program's chunk of parameter, gradient and three kinds of state. A kind
    that a formula does not have has address 0, and nothing loads it. If `found_inf`, the first of
    `numbers`, is set, the chunk has 0 elements, so that nothing is stored.

    Args:
        places: A row of `PLACES` for each tensor.
        grad_addresses: Address of each gradient.
        rows: For each tensor the index of its scalars.
        numbers: `found_inf`, then rows of `SCALARS`, in float64.
        chunks: For each program its tensor and its first element there.
        REAL: Type of the tensors.
        ALIGNED: Whether all addresses are multiples of 16 bytes.
        CHUNK: Elements of a chunk.
    """
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1)
    place = places + tensor * _PLACES
    x = numbers + 1 + tl.load(rows + tensor) * _SCALARS
    size = tl.minimum(tl.load(place + _SIZE) - begin, CHUNK)
    size = tl.where(tl.load(numbers) != 0, 0, size)
    params = _pointer(place + _PARAMS, begin, REAL, ALIGNED)
    grads = _pointer(grad_addresses + tensor, begin, REAL, ALIGNED)
    firsts = _pointer(place + _FIRSTS, begin, REAL, ALIGNED)
    seconds = _pointer(place + _SECONDS, begin, REAL, ALIGNED)
    thirds = _pointer(place + _THIRDS, begin, REAL, ALIGNED)
    return x, size, params, grads, firsts, seconds, thirds


@triton.jit
def _block_range(size, TAIL: tl.constexpr, BLOCK: tl.constexpr):
    """Return begin and end of the whole blocks; with `TAIL` of the elements after them."""
    in_blocks = size // BLOCK * BLOCK
    return in_blocks * TAIL, in_blocks + (size - in_blocks) * TAIL


@triton.jit
def _scalar(number, REAL: tl.constexpr):
    return tl.load(number).to(REAL)


@triton.jit
def _beta(number, REAL: tl.constexpr):
    """Return the decay beta of a moment, and 1 - beta, subtracted in float64."""
    beta = tl.load(number)
    return beta.to(REAL), (1 - beta).to(REAL)


@triton.jit
def _betas(x, REAL: tl.constexpr):
    """Return beta1, 1 - beta1, beta2 and 1 - beta2 from the scalars of a tensor."""
    beta1, rest1 = _beta(x + _BETA1, REAL)
    beta2, rest2 = _beta(x + _BETA2, REAL)
    return beta1, rest1, beta2, rest2


@triton.jit
def _load(
    pointer, at, size, TAIL: tl.constexpr
):  # with a mask a whole block would not be loaded as vectors
    if TAIL:
        return tl.load(pointer + at, mask=at < size, other=0.0)
    return tl.load(pointer + at)


@triton.jit
def _store(pointer, at, value, size, TAIL: tl.constexpr):
    if TAIL:
        tl.store(pointer + at, value, mask=at < size)
    else:
        tl.store(pointer + at, value)


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
def _lerp(a, b, beta, rest):  # exact where a is b and where beta is 0
    return tl.where(rest < 0.5, a + rest * (b - a), b - beta * (b - a))


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
def _update_moments(firsts, seconds, at, g, beta1, rest1, beta2, rest2, size, TAIL: tl.constexpr):
    """Update the first and second moment of a block in place, and return both."""
    first = _lerp(_load(firsts, at, size, TAIL), g, beta1, rest1)
    second = beta2 * _load(seconds, at, size, TAIL) + rest2 * g * g
    _store(firsts, at, first, size, TAIL)
    _store(seconds, at, second, size, TAIL)
    return first, second


@triton.jit
def adam(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `adam_update._single_tensor_adam` for one chunk of a tensor."""
    x, size, params, grads, firsts, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1, beta2, rest2 = _betas(x, REAL)
    scale = _scalar(x + _SCALE, REAL)
    keep = _scalar(x + _KEEP, REAL)
    root = _scalar(x + _ROOT, REAL)
    eps = _scalar(x + _EPS, REAL)
    l2 = _scalar(x + _L2, REAL)
    unscale = _scalar(x + _UNSCALE, REAL)
    nesterov = tl.load(x + _NESTEROV)
    for TAIL in tl.static_range(2):
        start, stop = _block_range(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL) * unscale
            g = tl.where(l2 != 0, g + l2 * w, g)
            first, second = _update_moments(
                firsts, seconds, at, g, beta1, rest1, beta2, rest2, size, TAIL
            )
            direction = tl.where(nesterov != 0, _lerp(first, g, beta1, rest1), first)
            step = scale * _divide(direction, _sqrt(second) * root + eps)
            _store(params, at, keep * w - step, size, TAIL)


@triton.jit
def adamax(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `adamax._single_tensor_adamax` for one chunk of a tensor."""
    x, size, params, grads, firsts, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1 = _beta(x + _BETA1, REAL)
    beta2 = _scalar(x + _BETA2, REAL)
    scale = _scalar(x + _SCALE, REAL)
    keep = _scalar(x + _KEEP, REAL)
    l1 = _scalar(x + _L1, REAL)
    l2 = _scalar(x + _L2, REAL)
    eps = _scalar(x + _EPS, REAL)
    eps_gradient = _scalar(x + _EPS_GRADIENT, REAL)
    eps_denominator = _scalar(x + _EPS_DENOMINATOR, REAL)
    for TAIL in tl.static_range(2):
        start, stop = _block_range(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _add_coupled_decay(_load(grads, at, size, TAIL), w, l1, l2)
            first = _lerp(_load(firsts, at, size, TAIL), g, beta1, rest1)
            largest = tl.abs(g) + eps_gradient
            decayed = beta2 * _load(seconds, at, size, TAIL) + eps
            largest = tl.where(
                (decayed > largest) | (decayed != decayed), decayed, largest
            )  # NaN goes before every number
            _store(firsts, at, first, size, TAIL)
            _store(seconds, at, largest, size, TAIL)
            step = scale * _divide(first, largest + eps_denominator)
            _store(params, at, keep * w - step, size, TAIL)


@triton.jit
def _adam_direction(first, second, w, correction, root, eps, decay):
    adam = _divide(first * correction, _sqrt(second) * root + eps)
    return tl.where(decay != 0, adam + decay * w, adam)


@triton.jit
def _store_sums(sums, weights, directions):
    """Store the two sums of this program's chunk."""
    place = sums + 2 * tl.program_id(0)
    tl.store(place, weights)
    tl.store(place + 1, directions)


@triton.jit
def lamb_moments(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    sums,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the moments of a chunk for LAMB, and sum the squares for its norms.

    `sums` gets two numbers for each chunk: the sum of squared weights, and of squared directions.
    """
    x, size, params, grads, firsts, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1, beta2, rest2 = _betas(x, REAL)
    l1 = _scalar(x + _L1, REAL)
    l2 = _scalar(x + _L2, REAL)
    root = _scalar(x + _ROOT, REAL)
    correction = _scalar(x + _FIRST, REAL)
    eps = _scalar(x + _EPS, REAL)
    decay = _scalar(x + _DECAY, REAL)
    weights = tl.full((BLOCK,), 0.0, tl.float64)
    directions = tl.full((BLOCK,), 0.0, tl.float64)
    for TAIL in tl.static_range(2):
        start, stop = _block_range(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _add_coupled_decay(_load(grads, at, size, TAIL), w, l1, l2)
            first, second = _update_moments(
                firsts, seconds, at, g, beta1, rest1, beta2, rest2, size, TAIL
            )
            direction = _adam_direction(first, second, w, correction, root, eps, decay)
            if TAIL:  # with an eps of 0 nothing past the end is 0 / 0
                direction = tl.where(at < size, direction, 0.0)
            weights += w.to(tl.float64) * w.to(tl.float64)
            directions += direction.to(tl.float64) * direction.to(tl.float64)
    _store_sums(sums, tl.sum(weights, axis=0), tl.sum(directions, axis=0))


@triton.jit
def set_ratios(
    places,
    rows,
    numbers,
    sums,
    ratios,
    REAL: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the trust ratio of one tensor, from the sums of its chunks.

    |w| is bounded, then the ratio |w| / (|r| + eps_ratio), where r is the direction. The weights
    were summed before `keep`, which is multiplied here. The ratio is 1 if the tensor is not adapted
    or one of the norms is 0. MARS sets both bounds of |w| to 1, and gets 1 / |c|, at most 1.
    """
    tensor = tl.program_id(0)
    place = places + tensor * _PLACES
    x = numbers + 1 + tl.load(rows + tensor) * _SCALARS
    chunks = (tl.load(place + _SIZE) + CHUNK - 1) // CHUNK
    first_sum = sums + 2 * tl.load(place + _CHUNKS)
    weights = tl.full((BLOCK,), 0.0, tl.float64)
    directions = tl.full((BLOCK,), 0.0, tl.float64)
    for start in range(0, chunks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weights += tl.load(first_sum + 2 * at, mask=at < chunks, other=0.0)
        directions += tl.load(first_sum + 2 * at + 1, mask=at < chunks, other=0.0)
    weight_norm = tl.abs(tl.load(x + _KEEP)) * tl.sqrt(tl.sum(weights, axis=0))
    weight_norm = _bounded(weight_norm, tl.load(x + _MIN_NORM), tl.load(x + _MAX_NORM))
    update_norm = tl.sqrt(tl.sum(directions, axis=0))
    adapted = (tl.load(x + _ADAPT) != 0) & (weight_norm > 0) & (update_norm > 0)
    ratio = weight_norm / tl.where(adapted, update_norm + tl.load(x + _EPS_RATIO), 1.0)
    ratio = _bounded(ratio, tl.load(x + _MIN_RATIO), tl.load(x + _MAX_RATIO))
    tl.store(ratios + tensor, tl.where(adapted, ratio, 1.0).to(REAL))


@triton.jit
def lamb_update(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    ratios,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move the weights of a chunk for LAMB: w = keep w - lr ratio direction.

    The moments are those that `lamb_moments` stored, so the direction is computed again.
    """
    x, size, params, _, firsts, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    keep = _scalar(x + _KEEP, REAL)
    eps = _scalar(x + _EPS, REAL)
    root = _scalar(x + _ROOT, REAL)
    correction = _scalar(x + _FIRST, REAL)
    decay = _scalar(x + _DECAY, REAL)
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    scale = (tl.load(x + _SCALE) * tl.load(ratios + tensor)).to(REAL)
    for TAIL in tl.static_range(2):
        start, stop = _block_range(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            first = _load(firsts, at, size, TAIL)
            direction = _adam_direction(
                first, _load(seconds, at, size, TAIL), w, correction, root, eps, decay
            )
            _store(params, at, keep * w - scale * direction, size, TAIL)


@triton.jit
def lion(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `lion._single_tensor_lion` for one chunk of a tensor."""
    x, size, params, grads, firsts, _, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1, beta2, rest2 = _betas(x, REAL)
    scale = _scalar(x + _SCALE, REAL)
    keep = _scalar(x + _KEEP, REAL)
    for TAIL in tl.static_range(2):
        start, stop = _block_range(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL)
            first = _load(firsts, at, size, TAIL)
            step = scale * _sign(_lerp(first, g, beta1, rest1))
            _store(params, at, keep * w - step, size, TAIL)
            _store(firsts, at, _lerp(first, g, beta2, rest2), size, TAIL)


@triton.jit
def schedule_free(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `schedule_free._single_tensor_schedule_free` for one chunk of a tensor."""
    x, size, params, grads, zs, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta2, rest2 = _beta(x + _BETA2, REAL)
    root = _scalar(x + _ROOT, REAL)
    eps = _scalar(x + _EPS, REAL)
    scale = _scalar(x + _SCALE, REAL)
    decay = _scalar(x + _DECAY, REAL)
    rate = _scalar(x + _RATE, REAL)
    mix, rest = _beta(x + _MIX, REAL)
    for TAIL in tl.static_range(2):
        start, stop = _block_range(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL)
            z = _load(zs, at, size, TAIL)
            second = beta2 * _load(seconds, at, size, TAIL) + rest2 * g * g
            direction = _adam_direction(g, second, w, 1.0, root, eps, decay)
            _store(seconds, at, second, size, TAIL)
            _store(params, at, _lerp(w, z, rest, mix) - scale * direction, size, TAIL)
            _store(zs, at, z - rate * direction, size, TAIL)


@triton.jit
def ademamix(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `ademamix._single_tensor_ademamix` for one chunk of a tensor."""
    x, size, params, grads, firsts, slows, seconds = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1, beta2, rest2 = _betas(x, REAL)
    beta3, rest3 = _beta(x + _BETA3, REAL)
    scale = _scalar(x + _SCALE, REAL)
    keep = _scalar(x + _KEEP, REAL)
    root = _scalar(x + _ROOT, REAL)
    eps = _scalar(x + _EPS, REAL)
    correction = _scalar(x + _FIRST, REAL)
    alpha = _scalar(x + _ALPHA, REAL)
    for TAIL in tl.static_range(2):
        start, stop = _block_range(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL)
            slow = _lerp(_load(slows, at, size, TAIL), g, beta3, rest3)
            first, second = _update_moments(
                firsts, seconds, at, g, beta1, rest1, beta2, rest2, size, TAIL
            )
            _store(slows, at, slow, size, TAIL)
            mixed = first * correction + alpha * slow
            step = scale * _divide(mixed, _sqrt(second) * root + eps)
            _store(params, at, keep * w - step, size, TAIL)


@triton.jit
def mars_norm(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    sums,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the squared corrected gradients of a chunk for MARS; 0 for a tensor without correction.

    `sums` gets two numbers for each chunk, as from `lamb_moments`: 0 and this sum.
    """
    x, size, _, grads, _, _, lasts = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    strength = tl.load(x + _STRENGTH)
    rest = (1 + strength).to(REAL)
    strength = strength.to(REAL)
    size = tl.where(tl.load(x + _ADAPT) != 0, size, 0)
    squares = tl.full((BLOCK,), 0.0, tl.float64)
    for TAIL in tl.static_range(2):
        start, stop = _block_range(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            g = _load(grads, at, size, TAIL)
            c = _lerp(_load(lasts, at, size, TAIL), g, -strength, rest)
            squares += c.to(tl.float64) * c.to(tl.float64)
    # In the dtype of the tensors, so that it is infinite where it is to the loop.
    total = tl.sum(squares, axis=0).to(REAL)
    _store_sums(sums, tl.full((), 0.0, tl.float64), total.to(tl.float64))


@triton.jit
def mars_update(
    places,
    grad_addresses,
    rows,
    numbers,
    chunks,
    ratios,
    REAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute `mars._single_tensor_mars` for one chunk of a tensor, once its norm is known.

    c is the corrected gradient times the ratio, or the gradient of a tensor without correction.
    """
    x, size, params, grads, firsts, seconds, lasts = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1, beta2, rest2 = _betas(x, REAL)
    scale = _scalar(x + _SCALE, REAL)
    keep = _scalar(x + _KEEP, REAL)
    root = _scalar(x + _ROOT, REAL)
    eps = _scalar(x + _EPS, REAL)
    strength = tl.load(x + _STRENGTH)
    rest = (1 + strength).to(REAL)
    strength = strength.to(REAL)
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    ratio = _scalar(ratios + tensor, REAL)
    adapt = tl.load(x + _ADAPT) != 0
    for TAIL in tl.static_range(2):
        start, stop = _block_range(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL)
            c = ratio * _lerp(_load(lasts, at, size, TAIL), g, -strength, rest)
            c = tl.where(adapt, c, g)
            first, second = _update_moments(
                firsts, seconds, at, c, beta1, rest1, beta2, rest2, size, TAIL
            )
            _store(lasts, at, g, size, TAIL)
            step = scale * _divide(first, _sqrt(second) * root + eps)
            _store(params, at, keep * w - step, size, TAIL)
