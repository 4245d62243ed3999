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
 *
 * Lion has one moment, and takes the sign of a mean of it and the gradient, which is 0 for 0 and NaN:
 *
 *   x = x * decay - step_size * sign(beta1 * m + one_minus_beta1 * g)
 *   m = settle(beta2 * m + one_minus_beta2 * g)
 *
 * Moments in bf16: x takes m and v in fp32, as above. What is stored of them is rounded stochastically: 16 random bits
 * are added to the bits of the settled number, and the upper 16 bits of the sum stay. So on average nothing is lost.
 * Element n of its unit has random bits of its own, by a hash of n and a key of 64 bits (lowbias32 of Chris Wellons, with
 * the key added twice; elements 2^32 apart share theirs):
 *
 *   h = n ^ low half of the key;  h ^= h >> 16;  h *= 0x7feb352d
 *   h ^= h >> 15;  h += high half of the key;    h *= 0x846ca68b;  h ^= h >> 16
 *
 * m takes the lower 16 bits of h, and v the upper ones.
 *
 * Moments in 8 bits are numbers of fp32 as well, with 2 bits of mantissa, that lie in a range of their own. Their bits of
 * fp32 above the lowest 21 that they lack, less an offset, are the code, and 0 is the code of zero:
 *
 *   m  a sign and 7 bits, from 2^-27 to 20, offset 399      v  8 bits, from 2^-54 to 640, offset 291
 *
 * The 16 random bits, times 32, are added before the lowest 21 bits are cut off. What lies below the range of m becomes
 * the smallest number in as many of 65,536 cases as is right on average, else zero. v becomes zero only if it is: a step
 * is m over its root, which must not run away. What lies above the range becomes the largest number, and what is not
 * finite the last code, a NaN.
 */
#ifndef MEGATIER_ADAMW_H
#define MEGATIER_ADAMW_H

#include "thread_pool.h"

struct adamw_scalars {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, sqrt_bias2, grad_scale;
};

/* How moments are stored: in fp32 as they are, or rounded to bf16 or to 8 bits. */
struct adamw_rounding {
    size_t moment_bytes; /* 4, 2 or 1 */
    uint32_t key_low, key_high;
    uint32_t first; /* number of the planes' first element in its unit, modulo 2^32 */
};

/* remainder NULL: weight is the fp32 master; else it is bf16. Moments are of the type that the rounding says.
 * exp_avg_sq NULL: Lion, whose moment is exp_avg, in fp32. */
struct adamw_planes {
    void *weight;
    int16_t *remainder;
    void *exp_avg, *exp_avg_sq;
};

/* State, the same or another place for what becomes of it, plane by plane, and the gradient, of the weight's type. */
struct adamw_work {
    struct adamw_planes before, after;
    const void *grad;
    struct adamw_rounding rounding;
};

struct adamw_segment {
    size_t start, stop; /* elements */
    float decay;        /* 1 - lr * weight_decay */
};

/* One batch, cut so that num_threads threads have work; results do not depend on the cut. NULL: no memory. */
struct batch *adamw_batch(const struct adamw_work *work, const struct adamw_segment *segments, size_t num_segments,
                          const struct adamw_scalars *scalars, size_t num_threads);

#endif
