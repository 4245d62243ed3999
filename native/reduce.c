#include "reduce.h"

#include <math.h>

#include "isa.h"

void copy(void *target, const void *source, size_t num_bytes) { memcpy(target, source, num_bytes); }

void fill(void *target, int byte, size_t num_bytes) { memset(target, byte, num_bytes); }

ISA_BODY split_body(const float *restrict master, uint16_t *restrict weight, int16_t *restrict remainder, size_t n)
{
    for (size_t i = 0; i < n; i++)
        split_one(master[i], &weight[i], &remainder[i]);
}
ISA_DISPATCH(split, (const float *master, uint16_t *weight, int16_t *remainder, size_t n),
             (master, weight, remainder, n))

ISA_BODY join_body(const uint16_t *restrict weight, const int16_t *restrict remainder, float *restrict master, size_t n)
{
    for (size_t i = 0; i < n; i++)
        master[i] = join_one(weight[i], remainder[i]);
}
ISA_DISPATCH(join, (const uint16_t *weight, const int16_t *remainder, float *master, size_t n),
             (weight, remainder, master, n))

/* Through a small block, because target may be source: a block is written only after all of it was read. */
ISA_BODY round_bf16_body(const float *source, uint16_t *target, size_t n)
{
    enum { BLOCK = 1024 };
    uint16_t rounded[BLOCK];
    for (size_t start = 0; start < n; start += BLOCK) {
        size_t count = n - start < BLOCK ? n - start : BLOCK;
        for (size_t i = 0; i < count; i++) {
            uint32_t bits = float_bits(one_nan(source[start + i]));
            rounded[i] = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
        }
        memcpy(target + start, rounded, count * sizeof *rounded);
    }
}
ISA_DISPATCH(round_bf16, (const float *source, uint16_t *target, size_t n), (source, target, n))

ISA_BODY accumulate_body(float *restrict accumulator, const float *restrict source, size_t n)
{
    for (size_t i = 0; i < n; i++)
        accumulator[i] += source[i];
}
ISA_DISPATCH(accumulate, (float *accumulator, const float *source, size_t n), (accumulator, source, n))

static inline float fp32_one(float value) { return value; }

/* A fixed tree: 256 lanes side by side, then folded in halves, so that wide vectors and a GPU can follow it. */
#define SUM_SQUARES_BODY(name, type, as_float)                                                      \
    ISA_BODY name##_body(const type *values, size_t n, double *partials)                            \
    {                                                                                               \
        for (size_t start = 0; start < n; start += SUM_TILE_ELEMENTS) {                             \
            size_t stop = n - start < SUM_TILE_ELEMENTS ? n : start + SUM_TILE_ELEMENTS;            \
            double lanes[SUM_LANES] = {0};                                                          \
            for (size_t row = start; row < stop; row += SUM_LANES) {                                \
                size_t count = stop - row < SUM_LANES ? stop - row : SUM_LANES;                     \
                for (size_t lane = 0; lane < count; lane++) {                                       \
                    double value = as_float(values[row + lane]);                                    \
                    lanes[lane] += value * value;                                                   \
                }                                                                                   \
            }                                                                                       \
            for (size_t half = SUM_LANES / 2; half; half /= 2)                                      \
                for (size_t lane = 0; lane < half; lane++)                                          \
                    lanes[lane] += lanes[lane + half];                                              \
            partials[start / SUM_TILE_ELEMENTS] = lanes[0];                                         \
        }                                                                                           \
    }                                                                                               \
    ISA_DISPATCH(name, (const type *values, size_t n, double *partials), (values, n, partials))

SUM_SQUARES_BODY(sum_squares_fp32, float, fp32_one)
SUM_SQUARES_BODY(sum_squares_bf16, uint16_t, float_of_bf16)

#define EXACT_PARTIALS_MAX 2200 /* partials do not overlap, and the bits of fp64 have 2,098 places */

/* Shewchuk's sum: partials that do not overlap hold the exact total; it is rounded once, to nearest even, at the end. */
double sum_exactly(const double *values, size_t n)
{
    double partials[EXACT_PARTIALS_MAX], plain = 0;
    size_t used = 0;
    for (size_t i = 0; i < n; i++) {
        double x = values[i];
        plain += x;
        if (!isfinite(plain))
            continue;
        size_t kept = 0;
        for (size_t j = 0; j < used; j++) {
            double y = partials[j];
            if (fabs(x) < fabs(y)) {
                double larger = y;
                y = x;
                x = larger;
            }
            double high = x + y, low = y - (high - x);
            if (low != 0)
                partials[kept++] = low;
            x = high;
        }
        partials[kept++] = x;
        used = kept;
    }
    if (!isfinite(plain) || !used)
        return plain;
    double high = partials[--used], low = 0;
    while (used && low == 0) {
        double x = high, y = partials[--used];
        high = x + y;
        low = y - (high - x);
    }
    /* A tie was rounded to even, but what is left says to which side it belongs. */
    if (used && ((low < 0 && partials[used - 1] < 0) || (low > 0 && partials[used - 1] > 0))) {
        double twice = low * 2, other = high + twice;
        if (twice == other - high)
            high = other;
    }
    return high;
}
