/* Plain loops over planes: split and join of the master, rounding, gradient sums, copies. One thread, any alignment
 * that suits the element type, the same bits at every instruction set level. */
#ifndef MEGATIER_REDUCE_H
#define MEGATIER_REDUCE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float float_of_bf16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

/* Every NaN becomes the one quiet NaN 0x7fc00000: payloads differ between processors, stored bits must not. */
static inline float one_nan(float x)
{
    uint32_t bits = float_bits(x);
    return float_of((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits);
}

/* fp32 master -> bf16 weight, rounded half away from zero, and the int16 that is missing. A finite master above the
 * largest bf16 has weight inf and a negative remainder, and still comes back exactly; a NaN comes back as NaN. */
static inline void split_one(float master, uint16_t *weight, int16_t *remainder)
{
    uint32_t bits = float_bits(one_nan(master)), high = (bits + 0x8000u) >> 16;
    *weight = (uint16_t)high;
    *remainder = (int16_t)(bits - (high << 16));
}

static inline float join_one(uint16_t weight, int16_t remainder)
{
    return float_of(((uint32_t)weight << 16) + (uint32_t)(int32_t)remainder);
}

#define SUM_TILE_ELEMENTS 65536
#define SUM_LANES 256

void copy(void *target, const void *source, size_t num_bytes);
void fill(void *target, int byte, size_t num_bytes);
void split(const float *master, uint16_t *weight, int16_t *remainder, size_t num_elements);
void join(const uint16_t *weight, const int16_t *remainder, float *master, size_t num_elements);
/* Round to nearest even; target may be source. */
void round_bf16(const float *source, uint16_t *target, size_t num_elements);
void accumulate(float *accumulator, const float *source, size_t num_elements);
/* One fp64 per tile of SUM_TILE_ELEMENTS; the order of additions is that of _native.pyi. */
void sum_squares_fp32(const float *values, size_t num_elements, double *partials);
void sum_squares_bf16(const uint16_t *values, size_t num_elements, double *partials);
/* As exact as one rounding allows; a value or a running sum that is not finite gives the plain sum. */
double sum_exactly(const double *values, size_t num_elements);

#endif
