#include "adamw.h"

#include "isa.h"
#include "reduce.h"

#define REQUEST_ELEMENTS_MAX ((size_t)1 << 18)
#define REQUEST_ELEMENTS_MIN ((size_t)1 << 14)
#define BLOCK_ELEMENTS ((size_t)256)
#define AHEAD_ELEMENTS ((size_t)512)
#define LINE_BYTES 64

struct adamw_request {
    struct adamw_planes planes; /* of this request's first element */
    size_t num_elements;
    float decay;
    struct adamw_scalars scalars;
};

/* On the bits: compilers split the same selects on floats into branches of their own and repeat the square root. */
static inline float settle(float moment)
{
    uint32_t bits = float_bits(moment), magnitude = bits & 0x7fffffffu;
    bits = magnitude < 0x00800000u ? 0 : bits;
    bits = magnitude > 0x7f800000u ? 0x7fc00000u : bits;
    return float_of(bits);
}

static inline float update_one(float x, float *exp_avg, float *exp_avg_sq, float grad, float decay,
                               const struct adamw_scalars *s)
{
    float g = grad * s->grad_scale;
    float m = settle(s->beta1 * *exp_avg + s->one_minus_beta1 * g);
    float v = settle(s->beta2 * *exp_avg_sq + s->one_minus_beta2 * (g * g));
    *exp_avg = m;
    *exp_avg_sq = v;
    return x * decay - s->step_size * (m / (sqrtf(v) / s->sqrt_bias2 + s->eps));
}

/* Ask for the plane's lines of the block that is AHEAD_ELEMENTS on; past its end that does no harm. Five planes at once
 * are too many for the processor's own prefetching: 8 % faster on 16 cores. */
static inline __attribute__((always_inline)) void fetch_ahead(const void *plane, size_t element_bytes)
{
    for (size_t at = 0; at < BLOCK_ELEMENTS * element_bytes; at += LINE_BYTES)
        __builtin_prefetch((const void *)((uintptr_t)plane + AHEAD_ELEMENTS * element_bytes + at), 1);
}

ISA_BODY update_split_body(uint16_t *restrict weight, int16_t *restrict remainder, float *restrict exp_avg,
                           float *restrict exp_avg_sq, const uint16_t *restrict grad, size_t n, float decay,
                           struct adamw_scalars scalars)
{
    for (size_t start = 0; start < n; start += BLOCK_ELEMENTS) {
        size_t stop = n - start < BLOCK_ELEMENTS ? n : start + BLOCK_ELEMENTS;
        fetch_ahead(weight + start, sizeof *weight);
        fetch_ahead(remainder + start, sizeof *remainder);
        fetch_ahead(exp_avg + start, sizeof *exp_avg);
        fetch_ahead(exp_avg_sq + start, sizeof *exp_avg_sq);
        fetch_ahead(grad + start, sizeof *grad);
        for (size_t i = start; i < stop; i++) {
            float x = join_one(weight[i], remainder[i]);
            x = update_one(x, &exp_avg[i], &exp_avg_sq[i], float_of_bf16(grad[i]), decay, &scalars);
            split_one(x, &weight[i], &remainder[i]);
        }
    }
}
ISA_DISPATCH(update_split,
             (uint16_t *weight, int16_t *remainder, float *exp_avg, float *exp_avg_sq, const uint16_t *grad, size_t n,
              float decay, struct adamw_scalars scalars),
             (weight, remainder, exp_avg, exp_avg_sq, grad, n, decay, scalars))

ISA_BODY update_whole_body(float *restrict weight, float *restrict exp_avg, float *restrict exp_avg_sq,
                           const float *restrict grad, size_t n, float decay, struct adamw_scalars scalars)
{
    for (size_t start = 0; start < n; start += BLOCK_ELEMENTS) {
        size_t stop = n - start < BLOCK_ELEMENTS ? n : start + BLOCK_ELEMENTS;
        fetch_ahead(weight + start, sizeof *weight);
        fetch_ahead(exp_avg + start, sizeof *exp_avg);
        fetch_ahead(exp_avg_sq + start, sizeof *exp_avg_sq);
        fetch_ahead(grad + start, sizeof *grad);
        for (size_t i = start; i < stop; i++)
            weight[i] = one_nan(update_one(weight[i], &exp_avg[i], &exp_avg_sq[i], grad[i], decay, &scalars));
    }
}
ISA_DISPATCH(update_whole,
             (float *weight, float *exp_avg, float *exp_avg_sq, const float *grad, size_t n, float decay,
              struct adamw_scalars scalars),
             (weight, exp_avg, exp_avg_sq, grad, n, decay, scalars))

static bool adamw_run(const void *record, struct failure *failure)
{
    const struct adamw_request *request = record;
    const struct adamw_planes *p = &request->planes;
    (void)failure; /* arithmetic cannot fail */
    if (p->remainder)
        update_split(p->weight, p->remainder, p->exp_avg, p->exp_avg_sq, p->grad, request->num_elements,
                     request->decay, request->scalars);
    else
        update_whole(p->weight, p->exp_avg, p->exp_avg_sq, p->grad, request->num_elements, request->decay,
                     request->scalars);
    return true;
}

static struct adamw_planes planes_at(const struct adamw_planes *planes, size_t start)
{
    size_t offset_bytes = start * (planes->remainder ? sizeof(uint16_t) : sizeof(float));
    return (struct adamw_planes){
        .weight = (char *)planes->weight + offset_bytes,
        .remainder = planes->remainder ? planes->remainder + start : NULL,
        .exp_avg = planes->exp_avg + start,
        .exp_avg_sq = planes->exp_avg_sq + start,
        .grad = (const char *)planes->grad + offset_bytes,
    };
}

/* About 6 MB of planes a request: long enough to hide the hand-over, short enough that all threads end together. */
static size_t request_elements(size_t num_elements, size_t num_threads)
{
    size_t share = num_elements / num_threads + 1;
    share = share > REQUEST_ELEMENTS_MAX ? REQUEST_ELEMENTS_MAX : share;
    share = share < REQUEST_ELEMENTS_MIN ? REQUEST_ELEMENTS_MIN : share;
    return (share + 1023) / 1024 * 1024;
}

struct batch *adamw_batch(const struct adamw_planes *planes, const struct adamw_segment *segments, size_t num_segments,
                          const struct adamw_scalars *scalars, size_t num_threads)
{
    size_t num_elements = 0, num_requests = 0, index = 0;
    for (size_t i = 0; i < num_segments; i++)
        num_elements += segments[i].stop - segments[i].start;
    size_t most = request_elements(num_elements, num_threads);
    for (size_t i = 0; i < num_segments; i++)
        num_requests += (segments[i].stop - segments[i].start + most - 1) / most;
    struct batch *batch = batch_new(num_requests, sizeof(struct adamw_request), adamw_run);
    for (size_t i = 0; batch && i < num_segments; i++)
        for (size_t start = segments[i].start; start < segments[i].stop; start += most) {
            size_t left = segments[i].stop - start;
            *(struct adamw_request *)batch_request(batch, index++) = (struct adamw_request){
                .planes = planes_at(planes, start),
                .num_elements = left < most ? left : most,
                .decay = segments[i].decay,
                .scalars = *scalars,
            };
        }
    return batch;
}
