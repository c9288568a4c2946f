"""The formulas of step.c over a list of tensors, in Triton.

Each as the loop of its paper's file in Python writes it.

Tensors are cut into chunks of a fixed size, one program each, and a chunk into blocks; where
tensors lie, and their numbers, stand in tables. Sums are added in float64, lane by lane, then chunk
by chunk, without atomics and in an order that depends on sizes alone, and no launch is tuned: the
same input gives the same bits. LAMB needs its direction twice, for the norm and for the update, and
computes it twice, as MARS its corrected gradient: that moves fewer bytes than to keep it, and needs
no memory.

Triton reads `tl.constexpr` in annotations as it stands: they are not postponed in this file.
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
"""Of every launch.

Sums are added in an order that warps decide, too; multiply-adds are not fused, as in step.c.
"""

MOST_STATES = 3
"""Kinds of state that a formula has at most."""
PLACES = ("params", "firsts", "seconds", "thirds", "size", "chunks")
"""What is told of each tensor besides `SCALARS`: addresses of the parameter and of each kind of
state, elements, which chunk is its first."""
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
def _pointer(lies_at, begin, REAL: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(lies_at).to(tl.pointer_type(REAL)) + begin
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
    """Return numbers and count of elements of this program, and where its tensors begin.

    These are parameter, gradient and three kinds of state; a kind that a formula does not have lies
    at 0, and nothing loads it. A step that is left out has no elements: nothing is stored.
    """
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    begin = tl.load(chunks + 2 * tl.program_id(0) + 1)
    lies_at = places + tensor * _PLACES
    x = numbers + 1 + tl.load(rows + tensor) * _SCALARS
    size = tl.minimum(tl.load(lies_at + _SIZE) - begin, CHUNK)
    size = tl.where(tl.load(numbers) != 0, 0, size)
    params = _pointer(lies_at + _PARAMS, begin, REAL, ALIGNED)
    grads = _pointer(grad_addresses + tensor, begin, REAL, ALIGNED)
    firsts = _pointer(lies_at + _FIRSTS, begin, REAL, ALIGNED)
    seconds = _pointer(lies_at + _SECONDS, begin, REAL, ALIGNED)
    thirds = _pointer(lies_at + _THIRDS, begin, REAL, ALIGNED)
    return x, size, params, grads, firsts, seconds, thirds


@triton.jit
def _part(size, TAIL: tl.constexpr, BLOCK: tl.constexpr):
    """Return first and last element of the whole blocks, or of the rest with `TAIL`."""
    in_blocks = size // BLOCK * BLOCK
    return in_blocks * TAIL, in_blocks + (size - in_blocks) * TAIL


@triton.jit
def _number(number, REAL: tl.constexpr):
    return tl.load(number).to(REAL)


@triton.jit
def _decay(number, REAL: tl.constexpr):
    """Return the decay of a moment and 1 minus it."""
    beta = tl.load(number)
    return beta.to(REAL), (1 - beta).to(REAL)


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
def _quotient(x, y):
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
def _coupled(g, w, l1, l2):
    g = tl.where(l2 != 0, g + l2 * w, g)
    return tl.where(l1 != 0, tl.where(w > 0, g + l1, tl.where(w < 0, g - l1, g)), g)


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
    """Step as `adam_update._single_tensor_adam`."""
    x, size, params, grads, firsts, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1 = _decay(x + _BETA1, REAL)
    beta2, rest2 = _decay(x + _BETA2, REAL)
    scale = _number(x + _SCALE, REAL)
    keep = _number(x + _KEEP, REAL)
    root = _number(x + _ROOT, REAL)
    eps = _number(x + _EPS, REAL)
    l2 = _number(x + _L2, REAL)
    unscale = _number(x + _UNSCALE, REAL)
    nesterov = tl.load(x + _NESTEROV)
    for TAIL in tl.static_range(2):
        start, stop = _part(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL) * unscale
            g = tl.where(l2 != 0, g + l2 * w, g)
            first = _lerp(_load(firsts, at, size, TAIL), g, beta1, rest1)
            second = beta2 * _load(seconds, at, size, TAIL) + rest2 * g * g
            _store(firsts, at, first, size, TAIL)
            _store(seconds, at, second, size, TAIL)
            direction = tl.where(nesterov != 0, _lerp(first, g, beta1, rest1), first)
            moved = scale * _quotient(direction, _sqrt(second) * root + eps)
            _store(params, at, keep * w - moved, size, TAIL)


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
    """Step as `adamax._single_tensor_adamax`."""
    x, size, params, grads, firsts, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1 = _decay(x + _BETA1, REAL)
    beta2 = _number(x + _BETA2, REAL)
    scale = _number(x + _SCALE, REAL)
    keep = _number(x + _KEEP, REAL)
    l1 = _number(x + _L1, REAL)
    l2 = _number(x + _L2, REAL)
    eps = _number(x + _EPS, REAL)
    eps_gradient = _number(x + _EPS_GRADIENT, REAL)
    eps_denominator = _number(x + _EPS_DENOMINATOR, REAL)
    for TAIL in tl.static_range(2):
        start, stop = _part(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _coupled(_load(grads, at, size, TAIL), w, l1, l2)
            first = _lerp(_load(firsts, at, size, TAIL), g, beta1, rest1)
            largest = tl.abs(g) + eps_gradient
            faded = beta2 * _load(seconds, at, size, TAIL) + eps
            largest = tl.where(
                (faded > largest) | (faded != faded), faded, largest
            )  # NaN goes before every number
            _store(firsts, at, first, size, TAIL)
            _store(seconds, at, largest, size, TAIL)
            moved = scale * _quotient(first, largest + eps_denominator)
            _store(params, at, keep * w - moved, size, TAIL)


@triton.jit
def _direction(first, second, w, correction, root, eps, decay):
    adam = _quotient(first * correction, _sqrt(second) * root + eps)
    return tl.where(decay != 0, adam + decay * w, adam)


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
    """Compute the first half of `lamb._single_tensor_lamb`.

    Moments, squares of weights and directions by chunk.
    """
    x, size, params, grads, firsts, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1 = _decay(x + _BETA1, REAL)
    beta2, rest2 = _decay(x + _BETA2, REAL)
    l1 = _number(x + _L1, REAL)
    l2 = _number(x + _L2, REAL)
    root = _number(x + _ROOT, REAL)
    correction = _number(x + _FIRST, REAL)
    eps = _number(x + _EPS, REAL)
    decay = _number(x + _DECAY, REAL)
    weights = tl.full((BLOCK,), 0.0, tl.float64)
    directions = tl.full((BLOCK,), 0.0, tl.float64)
    for TAIL in tl.static_range(2):
        start, stop = _part(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _coupled(_load(grads, at, size, TAIL), w, l1, l2)
            first = _lerp(_load(firsts, at, size, TAIL), g, beta1, rest1)
            second = beta2 * _load(seconds, at, size, TAIL) + rest2 * g * g
            _store(firsts, at, first, size, TAIL)
            _store(seconds, at, second, size, TAIL)
            direction = _direction(first, second, w, correction, root, eps, decay)
            if TAIL:  # with an eps of 0 nothing past the end is 0 / 0
                direction = tl.where(at < size, direction, 0.0)
            weights += w.to(tl.float64) * w.to(tl.float64)
            directions += direction.to(tl.float64) * direction.to(tl.float64)
    tl.store(sums + 2 * tl.program_id(0), tl.sum(weights, axis=0))
    tl.store(sums + 2 * tl.program_id(0) + 1, tl.sum(directions, axis=0))


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
    """Compute the trust ratio of each tensor, from the sums of its chunks."""
    tensor = tl.program_id(0)
    lies_at = places + tensor * _PLACES
    x = numbers + 1 + tl.load(rows + tensor) * _SCALARS
    chunks = (tl.load(lies_at + _SIZE) + CHUNK - 1) // CHUNK
    first_sum = sums + 2 * tl.load(lies_at + _CHUNKS)
    weights = tl.full((BLOCK,), 0.0, tl.float64)
    directions = tl.full((BLOCK,), 0.0, tl.float64)
    for start in range(0, chunks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weights += tl.load(first_sum + 2 * at, mask=at < chunks, other=0.0)
        directions += tl.load(first_sum + 2 * at + 1, mask=at < chunks, other=0.0)
    norm = tl.abs(tl.load(x + _KEEP)) * tl.sqrt(tl.sum(weights, axis=0))
    norm = _bounded(norm, tl.load(x + _MIN_NORM), tl.load(x + _MAX_NORM))
    length = tl.sqrt(tl.sum(directions, axis=0))
    adapted = (tl.load(x + _ADAPT) != 0) & (norm > 0) & (length > 0)
    ratio = norm / tl.where(adapted, length + tl.load(x + _EPS_RATIO), 1.0)
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
    """Compute the second half of `lamb._single_tensor_lamb`.

    The direction again, as long as the ratio says.
    """
    x, size, params, _, firsts, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    keep = _number(x + _KEEP, REAL)
    eps = _number(x + _EPS, REAL)
    root = _number(x + _ROOT, REAL)
    correction = _number(x + _FIRST, REAL)
    decay = _number(x + _DECAY, REAL)
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    scale = (tl.load(x + _SCALE) * tl.load(ratios + tensor)).to(REAL)
    for TAIL in tl.static_range(2):
        start, stop = _part(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            first = _load(firsts, at, size, TAIL)
            direction = _direction(
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
    """Step as `lion._single_tensor_lion`."""
    x, size, params, grads, firsts, _, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1 = _decay(x + _BETA1, REAL)
    beta2, rest2 = _decay(x + _BETA2, REAL)
    scale = _number(x + _SCALE, REAL)
    keep = _number(x + _KEEP, REAL)
    for TAIL in tl.static_range(2):
        start, stop = _part(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL)
            first = _load(firsts, at, size, TAIL)
            moved = scale * _sign(_lerp(first, g, beta1, rest1))
            _store(params, at, keep * w - moved, size, TAIL)
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
    """Step as `schedule_free._single_tensor_schedule_free`."""
    x, size, params, grads, zs, seconds, _ = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta2, rest2 = _decay(x + _BETA2, REAL)
    root = _number(x + _ROOT, REAL)
    eps = _number(x + _EPS, REAL)
    scale = _number(x + _SCALE, REAL)
    decay = _number(x + _DECAY, REAL)
    rate = _number(x + _RATE, REAL)
    mix, rest = _decay(x + _MIX, REAL)
    for TAIL in tl.static_range(2):
        start, stop = _part(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL)
            z = _load(zs, at, size, TAIL)
            second = beta2 * _load(seconds, at, size, TAIL) + rest2 * g * g
            direction = _direction(g, second, w, 1.0, root, eps, decay)
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
    """Step as `ademamix._single_tensor_ademamix`."""
    x, size, params, grads, firsts, slows, seconds = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1 = _decay(x + _BETA1, REAL)
    beta2, rest2 = _decay(x + _BETA2, REAL)
    beta3, rest3 = _decay(x + _BETA3, REAL)
    scale = _number(x + _SCALE, REAL)
    keep = _number(x + _KEEP, REAL)
    root = _number(x + _ROOT, REAL)
    eps = _number(x + _EPS, REAL)
    correction = _number(x + _FIRST, REAL)
    alpha = _number(x + _ALPHA, REAL)
    for TAIL in tl.static_range(2):
        start, stop = _part(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL)
            first = _lerp(_load(firsts, at, size, TAIL), g, beta1, rest1)
            slow = _lerp(_load(slows, at, size, TAIL), g, beta3, rest3)
            second = beta2 * _load(seconds, at, size, TAIL) + rest2 * g * g
            _store(firsts, at, first, size, TAIL)
            _store(slows, at, slow, size, TAIL)
            _store(seconds, at, second, size, TAIL)
            mixed = first * correction + alpha * slow
            moved = scale * _quotient(mixed, _sqrt(second) * root + eps)
            _store(params, at, keep * w - moved, size, TAIL)


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
    """Compute the squares of the corrected gradients of `mars._single_tensor_mars`."""
    x, size, _, grads, _, _, lasts = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    strength = tl.load(x + _STRENGTH)
    rest = (1 + strength).to(REAL)
    strength = strength.to(REAL)
    size = tl.where(tl.load(x + _ADAPT) != 0, size, 0)
    squares = tl.full((BLOCK,), 0.0, tl.float64)
    for TAIL in tl.static_range(2):
        start, stop = _part(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            g = _load(grads, at, size, TAIL)
            c = _lerp(_load(lasts, at, size, TAIL), g, -strength, rest)
            squares += c.to(tl.float64) * c.to(tl.float64)
    tl.store(sums + 2 * tl.program_id(0), tl.full((), 0.0, tl.float64))
    # In the dtype of the tensors, so that it is infinite where it is to the loop.
    total = tl.sum(squares, axis=0).to(REAL)
    tl.store(sums + 2 * tl.program_id(0) + 1, total.to(tl.float64))


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
    """Step as `mars._single_tensor_mars`, once the norms are known."""
    x, size, params, grads, firsts, seconds, lasts = _job(
        places, grad_addresses, rows, numbers, chunks, REAL, ALIGNED, CHUNK
    )
    beta1, rest1 = _decay(x + _BETA1, REAL)
    beta2, rest2 = _decay(x + _BETA2, REAL)
    scale = _number(x + _SCALE, REAL)
    keep = _number(x + _KEEP, REAL)
    root = _number(x + _ROOT, REAL)
    eps = _number(x + _EPS, REAL)
    strength = tl.load(x + _STRENGTH)
    rest = (1 + strength).to(REAL)
    strength = strength.to(REAL)
    tensor = tl.load(chunks + 2 * tl.program_id(0))
    ratio = _number(ratios + tensor, REAL)
    adapt = tl.load(x + _ADAPT) != 0
    for TAIL in tl.static_range(2):
        start, stop = _part(size, TAIL, BLOCK)
        for block in range(start, stop, BLOCK):
            at = block + tl.arange(0, BLOCK)
            w = _load(params, at, size, TAIL)
            g = _load(grads, at, size, TAIL)
            c = ratio * _lerp(_load(lasts, at, size, TAIL), g, -strength, rest)
            c = tl.where(adapt, c, g)
            first = _lerp(_load(firsts, at, size, TAIL), c, beta1, rest1)
            second = beta2 * _load(seconds, at, size, TAIL) + rest2 * c * c
            _store(firsts, at, first, size, TAIL)
            _store(seconds, at, second, size, TAIL)
            _store(lasts, at, g, size, TAIL)
            moved = scale * _quotient(first, _sqrt(second) * root + eps)
            _store(params, at, keep * w - moved, size, TAIL)
