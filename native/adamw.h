/* AdamW, defined once. fp32 throughout, each operation rounded on its own (no fused multiply-add), IEEE division and
 * square root, in exactly this order; the GPU version copies it bit for bit:
 *
 *   g = float(grad) * grad_scale
 *   m = settle(beta1 * m + one_minus_beta1 * g)
 *   v = settle(beta2 * v + one_minus_beta2 * (g * g))
 *   x = x * decay - step_size * (m / (sqrt(v) / sqrt_bias2 + eps))
 *
 * settle: a magnitude below 2^-126 becomes +0, so that no subnormal is kept or used; any NaN becomes 0x7fc00000, which
 * x does as well. m and v are settled where they are computed; stored ones are taken as they are.
 */
#ifndef MEGATIER_ADAMW_H
#define MEGATIER_ADAMW_H

#include "thread_pool.h"

struct adamw_scalars {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, sqrt_bias2, grad_scale;
};

/* remainder NULL: weight is the fp32 master; else it is bf16. */
struct adamw_planes {
    void *weight;
    int16_t *remainder;
    float *exp_avg, *exp_avg_sq;
};

/* State, the same or another place for what becomes of it, plane by plane, and the gradient, of the weight's type. */
struct adamw_work {
    struct adamw_planes before, after;
    const void *grad;
};

struct adamw_segment {
    size_t start, stop; /* elements */
    float decay;        /* 1 - lr * weight_decay */
};

/* One batch, cut so that num_threads threads have work; results do not depend on the cut. NULL: no memory. */
struct batch *adamw_batch(const struct adamw_work *work, const struct adamw_segment *segments, size_t num_segments,
                          const struct adamw_scalars *scalars, size_t num_threads);

#endif
