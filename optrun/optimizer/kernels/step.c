/* One step over a list of tensors: each formula as the loop of its paper's file in Python writes it.
 *
 * Tensors are cut into chunks of a fixed size, which threads take from one queue in a fixed order. Every element is
 * computed by the same operations whatever the number of threads or the instruction set (compiled without contraction to
 * fused multiply-add), and LAMB's sums are added lane by lane and chunk by chunk in order: the same input gives the same
 * bits on every machine of IEEE arithmetic. LAMB needs its direction twice, for the norm and for the update, and computes
 * it twice: that moves fewer bytes than to keep it, and needs no memory. So does MARS with its corrected gradient.
 *
 * The file includes itself once for float and once for double. */
#ifndef REAL
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

/* Elements. A block is short so that the processor loads the next one while it roots, divides and sums this one. */
enum { CHUNK = 16384, BLOCK = 64, LANES = 16, MOST_THREADS = 64 };
enum { AHEAD = 2048 };   /* bytes: what is read so much later is asked for now, across the ends of pages, too */
enum { WAVE = 1 << 18 }; /* elements between two passes at least: what was read is still in the cache */

#ifndef DIGEST
#define DIGEST ""
#endif
const char *optrun_digest(void) { return DIGEST; }

typedef struct { /* of one tensor; the order is that of `NUMBERS` in rows.py */
    double scale;   /* lr / (1 - beta1^t) of Adam and Adamax, the weights' own of Schedule-Free, lr of the others */
    double keep;    /* what decoupled decay leaves of a weight */
    double beta1, beta2, eps;
    double eps_gradient, eps_denominator; /* Adamax's, beside |g| and beside the maximum */
    double root;    /* 1 / sqrt(1 - beta2^t) */
    double first;   /* 1 / (1 - beta1^t) of LAMB and AdEMAMix */
    double l1, l2;  /* coupled decay */
    double decay;   /* inside the direction: LAMB's and Schedule-Free's */
    double unscale; /* 1 / loss scale */
    double adapt, nesterov; /* 0 or 1 */
    double min_norm, max_norm, eps_ratio, min_ratio, max_ratio; /* LAMB's bounds of |w| and of the ratio */
    double beta3, alpha; /* AdEMAMix's: decay and weight of the slow moment */
    double rate, mix;    /* Schedule-Free's: lr of z, share of z in the weights */
    double strength;     /* of MARS's correction; its ratio is 1 / max(1, |c|) */
} Numbers;

typedef struct {
    int64_t tensor, begin, end, chunk;
    int pass;
} Job;

typedef struct Step Step;
typedef void (*Update)(const Step *, const Job *);
struct Step {
    void **places;          /* of parameters, of gradients, of each kind of state: of all tensors */
    int64_t tensors;
    const Numbers *numbers; /* rows, which tensors share */
    const int64_t *rows;    /* of each tensor: its row of numbers */
    double *sums;           /* of each chunk: squares of weights, squares of directions */
    double *ratios;         /* of each tensor */
    int64_t *chunks;        /* first chunk of each tensor, and one past the last of all */
    _Atomic int64_t *open;  /* of each tensor: chunks that have not been summed, and the ratio */
    Job *jobs;
    int64_t count;
    _Atomic int64_t next;
    Update updates[2];
};

typedef double Lanes __attribute__((vector_size(LANES * sizeof(double))));

/* What takes most of the time is compiled for several instruction sets, of which the loader picks one. */
#if !defined(FAST) && defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#endif
#ifndef FAST
#define FAST
#endif
#define INLINE static inline __attribute__((always_inline))

static double bounded(double x, double low, double high) { return x < low ? low : x > high ? high : x; }

static void set_ratio(Step *step, int64_t tensor)
{
    double weights = 0, directions = 0;
    for (int64_t chunk = step->chunks[tensor]; chunk < step->chunks[tensor + 1]; chunk++) {
        weights += step->sums[2 * chunk];
        directions += step->sums[2 * chunk + 1];
    }
    const Numbers *x = &step->numbers[step->rows[tensor]];
    const double norm = bounded(fabs(x->keep) * sqrt(weights), x->min_norm, x->max_norm);
    if (x->adapt && norm > 0 && directions > 0)
        step->ratios[tensor] = bounded(norm / (sqrt(directions) + x->eps_ratio), x->min_ratio, x->max_ratio);
}

static void *work(void *given)
{
    Step *step = given;
    for (;;) {
        int64_t at = atomic_fetch_add(&step->next, 1);
        if (at >= step->count)
            return NULL;
        const Job *job = &step->jobs[at];
        /* What it waits for stands before it in the queue: a running thread has it. */
        while (job->pass && atomic_load(&step->open[job->tensor]))
            sched_yield();
        step->updates[job->pass](step, job);
        if (!job->pass && atomic_fetch_sub(&step->open[job->tensor], 1) == 2) {
            if (step->updates[1])
                set_ratio(step, job->tensor);
            atomic_store(&step->open[job->tensor], 0);
        }
    }
}

#define JOIN_(name, suffix) name##suffix
#define JOIN(name, suffix) JOIN_(name, suffix)
#define REAL float
#define SQRT sqrtf
#define OF(name) JOIN(name, _float)
#include "step.c"
#undef REAL
#undef SQRT
#undef OF
#define REAL double
#define SQRT sqrt
#define OF(name) JOIN(name, _double)
#include "step.c"

/* The second pass over the tensors of jobs[from:to], each from the chunk on that was read last. */
static int64_t append_second_pass(Job *jobs, int64_t from, int64_t to)
{
    int64_t count = to;
    for (int64_t begin = from, end; begin < to; begin = end) {
        for (end = begin; end < to && jobs[end].tensor == jobs[begin].tensor; end++)
            ;
        for (int64_t at = end; at-- > begin; count++) {
            jobs[count] = jobs[at];
            jobs[count].pass = 1;
        }
    }
    return count;
}

static void fill_queue(Step *step, const int64_t *sizes)
{
    const int64_t tensors = step->tensors;
    int64_t chunk = 0, from = 0, wave = 0;
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        step->chunks[tensor] = chunk;
        step->ratios[tensor] = 1;
        for (int64_t begin = 0; begin < sizes[tensor]; begin += CHUNK) {
            int64_t end = begin + CHUNK < sizes[tensor] ? begin + CHUNK : sizes[tensor];
            step->jobs[step->count++] = (Job){tensor, begin, end, chunk++, 0};
        }
        atomic_init(&step->open[tensor], chunk - step->chunks[tensor] + 1);
        wave += sizes[tensor];
        if (step->updates[1] && (wave >= WAVE || tensor == tensors - 1)) {
            from = step->count = append_second_pass(step->jobs, from, step->count);
            wave = 0;
        }
    }
    step->chunks[tensors] = chunk;
}

/* Update `tensors` tensors of `sizes` elements in place; ratios are written. Returns 0, or 1 where memory is short. */
int optrun_step(int formula, int wide, int64_t tensors, void **places, const int64_t *sizes, const int64_t *rows,
                const double *numbers, double *ratios, int threads)
{
    int64_t chunks = 1;
    for (int64_t tensor = 0; tensor < tensors; tensor++)
        chunks += (sizes[tensor] + CHUNK - 1) / CHUNK;
    const Update *updates = wide ? updates_double[formula] : updates_float[formula];
    Step step = {.places = places, .tensors = tensors, .numbers = (const Numbers *)numbers, .rows = rows,
                 .ratios = ratios, .updates = {updates[0], updates[1]}};
    step.jobs = malloc(2 * chunks * sizeof(Job));
    step.sums = malloc(2 * chunks * sizeof(double));
    step.chunks = malloc((tensors + 1) * sizeof(int64_t));
    step.open = malloc((tensors + 1) * sizeof(*step.open));
    int short_of_memory = !step.jobs || !step.sums || !step.chunks || !step.open;
    if (!short_of_memory) {
        fill_queue(&step, sizes);
        pthread_t others[MOST_THREADS];
        int64_t wanted = step.count / 4 < threads ? step.count / 4 : threads; /* a thread costs as much as a chunk */
        int started = 0;
        while (started + 1 < wanted && started < MOST_THREADS && !pthread_create(&others[started], NULL, work, &step))
            started++;
        work(&step);
        while (started)
            pthread_join(others[--started], NULL);
    }
    free(step.jobs);
    free(step.sums);
    free(step.chunks);
    free((void *)step.open);
    return short_of_memory;
}

#else /* -- the formulas, for one REAL ----------------------------------------------------------------------------- */

#define TENSOR(kind) ((REAL *)step->places[(kind) * step->tensors + job->tensor] + job->begin)
#define GIVEN                                           \
    const Numbers *x = &step->numbers[step->rows[job->tensor]];     \
    REAL *restrict w = TENSOR(0);                       \
    const REAL *restrict grad = TENSOR(1);              \
    REAL *restrict m = TENSOR(2);                       \
    const int64_t n = job->end - job->begin;            \
    const REAL beta1 = x->beta1, rest1 = 1 - x->beta1, beta2 = x->beta2, rest2 = 1 - x->beta2, eps = x->eps

/* Where the block from `begin` on ends. */
INLINE int64_t OF(block)(const REAL *const *read, int streams, int64_t begin, int64_t n)
{
    for (int64_t at = AHEAD; at < AHEAD + BLOCK * (int64_t)sizeof(REAL); at += 64)
        for (int stream = 0; stream < streams; stream++)
            __builtin_prefetch((const char *)(read[stream] + begin) + at);
    return n - begin < BLOCK ? n : begin + BLOCK;
}

#define STREAMS ((int)(sizeof(read) / sizeof(*read)))
#define EACH(...)                                                            \
    const REAL *const read[] = {__VA_ARGS__};                                \
    for (int64_t i = 0; i < n;)                                              \
        for (const int64_t end = OF(block)(read, STREAMS, i, n); i < end; i++)

/* beta a + rest b, exact where a is b and where beta is 0. Not for squares: with a infinite it is no number. */
INLINE REAL OF(lerp)(REAL a, REAL b, REAL beta, REAL rest)
{
    return rest < (REAL)0.5 ? a + rest * (b - a) : b - beta * (b - a);
}

INLINE REAL OF(sign)(REAL x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }

INLINE void OF(adam_as)(const Step *step, const Job *job, const int coupled, const int nesterov)
{
    GIVEN;
    REAL *restrict v = TENSOR(3);
    const REAL keep = x->keep, root = x->root, scale = x->scale, l2 = x->l2, unscale = x->unscale;
    EACH(w, grad, m, v) {
        REAL g = grad[i] * unscale;
        if (coupled)
            g += l2 * w[i];
        const REAL first = OF(lerp)(m[i], g, beta1, rest1), second = beta2 * v[i] + rest2 * (g * g);
        m[i] = first;
        v[i] = second;
        const REAL direction = nesterov ? OF(lerp)(first, g, beta1, rest1) : first;
        w[i] = keep * w[i] - scale * (direction / (SQRT(second) * root + eps));
    }
}

FAST static void OF(adam)(const Step *step, const Job *job) /* every case a loop without branches */
{
    const Numbers *x = &step->numbers[step->rows[job->tensor]];
    if (x->nesterov)
        x->l2 != 0 ? OF(adam_as)(step, job, 1, 1) : OF(adam_as)(step, job, 0, 1);
    else
        x->l2 != 0 ? OF(adam_as)(step, job, 1, 0) : OF(adam_as)(step, job, 0, 0);
}

FAST static void OF(adamax)(const Step *step, const Job *job)
{
    GIVEN;
    REAL *restrict v = TENSOR(3);
    (void)rest2;
    const REAL keep = x->keep, scale = x->scale, l1 = x->l1, l2 = x->l2;
    const REAL eps_gradient = x->eps_gradient, eps_denominator = x->eps_denominator;
    EACH(w, grad, m, v) {
        REAL g = grad[i];
        if (l2)
            g += l2 * w[i];
        if (l1)
            g += l1 * OF(sign)(w[i]);
        const REAL first = OF(lerp)(m[i], g, beta1, rest1);
        const REAL size = (g < 0 ? -g : g) + eps_gradient, faded = beta2 * v[i] + eps;
        const REAL largest = faded > size || faded != faded ? faded : size;
        m[i] = first;
        v[i] = largest;
        w[i] = keep * w[i] - scale * (first / (largest + eps_denominator));
    }
}

INLINE REAL OF(direction)(REAL first, REAL second, REAL w, REAL correction, REAL root, REAL eps, REAL decay, int decays)
{
    const REAL adam = first * correction / (SQRT(second) * root + eps);
    return decays ? adam + decay * w : adam;
}

INLINE void OF(add_squares)(Lanes *sums, const REAL *x, int64_t n)
{
    typedef REAL Some __attribute__((vector_size(LANES * sizeof(REAL)), aligned(sizeof(REAL)), may_alias));
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const Lanes some = __builtin_convertvector(*(const Some *)(x + i), Lanes);
        *sums += some * some;
    }
    for (; i < n; i++)
        (*sums)[i % 4] += (double)x[i] * x[i];
}

INLINE double OF(total)(const Lanes *sums)
{
    double four[4];
    for (int i = 0; i < 4; i++)
        four[i] = ((*sums)[i] + (*sums)[4 + i]) + ((*sums)[8 + i] + (*sums)[12 + i]);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

INLINE void OF(lamb_moments_as)(const Step *step, const Job *job, const int coupled, const int decays)
{
    GIVEN;
    REAL *restrict v = TENSOR(3);
    const REAL root = x->root, correction = x->first, l1 = x->l1, l2 = x->l2, decay = x->decay;
    Lanes weights = {0}, directions = {0};
    REAL direction[BLOCK];
    const REAL *const read[] = {w, grad, m, v};
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t length = OF(block)(read, STREAMS, begin, n) - begin;
        REAL *restrict W = w + begin, *restrict M = m + begin, *restrict V = v + begin;
        const REAL *restrict G = grad + begin;
        for (int64_t i = 0; i < length; i++) {
            REAL g = G[i];
            if (coupled && l2)
                g += l2 * W[i];
            if (coupled && l1)
                g += l1 * OF(sign)(W[i]);
            M[i] = OF(lerp)(M[i], g, beta1, rest1);
            V[i] = beta2 * V[i] + rest2 * (g * g);
            direction[i] = OF(direction)(M[i], V[i], W[i], correction, root, eps, decay, decays);
        }
        OF(add_squares)(&weights, W, length);
        OF(add_squares)(&directions, direction, length);
    }
    step->sums[2 * job->chunk] = OF(total)(&weights);
    step->sums[2 * job->chunk + 1] = OF(total)(&directions);
}

FAST static void OF(lamb_moments)(const Step *step, const Job *job) /* as `adam` */
{
    const Numbers *x = &step->numbers[step->rows[job->tensor]];
    const int coupled = x->l1 != 0 || x->l2 != 0;
    if ((REAL)x->decay != 0)
        coupled ? OF(lamb_moments_as)(step, job, 1, 1) : OF(lamb_moments_as)(step, job, 0, 1);
    else
        coupled ? OF(lamb_moments_as)(step, job, 1, 0) : OF(lamb_moments_as)(step, job, 0, 0);
}

FAST static void OF(lamb_update)(const Step *step, const Job *job)
{
    GIVEN;
    REAL *restrict v = TENSOR(3);
    (void)grad, (void)beta1, (void)beta2, (void)rest1, (void)rest2;
    const REAL keep = x->keep, root = x->root, correction = x->first, decay = x->decay;
    const REAL scale = x->scale * step->ratios[job->tensor];
    EACH(w, m, v)
        w[i] = keep * w[i] - scale * OF(direction)(m[i], v[i], w[i], correction, root, eps, decay, decay != 0);
}

FAST static void OF(lion)(const Step *step, const Job *job)
{
    GIVEN;
    (void)eps;
    const REAL keep = x->keep, scale = x->scale;
    EACH(w, grad, m) {
        const REAL g = grad[i], first = m[i];
        w[i] = keep * w[i] - scale * OF(sign)(OF(lerp)(first, g, beta1, rest1));
        m[i] = OF(lerp)(first, g, beta2, rest2);
    }
}

FAST static void OF(schedule_free)(const Step *step, const Job *job) /* m is z */
{
    GIVEN;
    (void)beta1, (void)rest1;
    REAL *restrict v = TENSOR(3);
    const REAL root = x->root, scale = x->scale, decay = x->decay, rate = x->rate, mix = x->mix, rest = 1 - x->mix;
    EACH(w, grad, m, v) {
        const REAL g = grad[i], second = beta2 * v[i] + rest2 * (g * g);
        REAL direction = g / (SQRT(second) * root + eps);
        if (decay)
            direction += decay * w[i];
        v[i] = second;
        w[i] = OF(lerp)(w[i], m[i], rest, mix) - scale * direction;
        m[i] -= rate * direction;
    }
}

FAST static void OF(ademamix)(const Step *step, const Job *job)
{
    GIVEN;
    REAL *restrict slow = TENSOR(3), *restrict v = TENSOR(4);
    const REAL keep = x->keep, root = x->root, scale = x->scale, correction = x->first, alpha = x->alpha;
    const REAL beta3 = x->beta3, rest3 = 1 - x->beta3;
    EACH(w, grad, m, v, slow) {
        const REAL g = grad[i], second = beta2 * v[i] + rest2 * (g * g);
        const REAL first = OF(lerp)(m[i], g, beta1, rest1), third = OF(lerp)(slow[i], g, beta3, rest3);
        m[i] = first;
        slow[i] = third;
        v[i] = second;
        w[i] = keep * w[i] - scale * ((first * correction + alpha * third) / (SQRT(second) * root + eps));
    }
}

/* MARS's c. */
INLINE REAL OF(corrected)(REAL last, REAL g, REAL strength) { return OF(lerp)(last, g, -strength, 1 + strength); }

FAST static void OF(mars_norm)(const Step *step, const Job *job)
{
    const Numbers *x = &step->numbers[step->rows[job->tensor]];
    const REAL *grad = TENSOR(1), *last = TENSOR(4), strength = x->strength;
    const int64_t n = x->adapt ? job->end - job->begin : 0;
    const REAL *const read[] = {grad, last};
    Lanes squares = {0};
    REAL c[BLOCK];
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        const int64_t length = OF(block)(read, STREAMS, begin, n) - begin;
        for (int64_t i = 0; i < length; i++)
            c[i] = OF(corrected)(last[begin + i], grad[begin + i], strength);
        OF(add_squares)(&squares, c, length);
    }
    step->sums[2 * job->chunk] = 0;
    step->sums[2 * job->chunk + 1] = (REAL)OF(total)(&squares); /* infinite where it is to the loop */
}

FAST static void OF(mars_update)(const Step *step, const Job *job)
{
    GIVEN;
    REAL *restrict v = TENSOR(3), *restrict last = TENSOR(4);
    const REAL keep = x->keep, root = x->root, scale = x->scale, strength = x->strength;
    const REAL ratio = step->ratios[job->tensor];
    const int adapt = x->adapt != 0;
    EACH(w, grad, m, v, last) {
        const REAL g = adapt ? OF(corrected)(last[i], grad[i], strength) * ratio : grad[i];
        const REAL first = OF(lerp)(m[i], g, beta1, rest1), second = beta2 * v[i] + rest2 * (g * g);
        last[i] = grad[i];
        m[i] = first;
        v[i] = second;
        w[i] = keep * w[i] - scale * (first / (SQRT(second) * root + eps));
    }
}

static const Update OF(updates)[][2] = { /* in the order of `ROWS` in rows.py */
    {OF(adam)}, {OF(adamax)}, {OF(lamb_moments), OF(lamb_update)}, {OF(lion)}, {OF(schedule_free)}, {OF(ademamix)},
    {OF(mars_norm), OF(mars_update)},
};
#endif
