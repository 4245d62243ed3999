/* Instruction set levels: one body, compiled once per level, chosen at run time. All levels give the same bits. */
#ifndef MEGATIER_ISA_H
#define MEGATIER_ISA_H

#include <stdatomic.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "megatier stores planes and checksums in little-endian order"
#endif

/* NEON belongs to the portable level of aarch64: every such processor has it, and compilers vectorise the bodies with it.
 * Every level above portable has an instruction for CRC32C. */
#if defined(__x86_64__)
enum isa_level { ISA_PORTABLE, ISA_AVX2, ISA_AVX512 };
#elif defined(__aarch64__)
enum isa_level { ISA_PORTABLE, ISA_CRC32 };
#else
enum isa_level { ISA_PORTABLE };
#endif

/* The level in use; defined and chosen in module.c. */
extern _Atomic int isa_level;

/* IEEE arithmetic without flush-to-zero and rounded to nearest, whatever the calling thread had set (torch's
 * set_flush_denormal, a library built with -ffast-math). Returns what to hand to float_state_restore. */
#if defined(__x86_64__)
#include <immintrin.h>
#define ISA_TARGET_AVX2 __attribute__((target("avx2")))
#define ISA_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
static inline unsigned float_state_ieee(void)
{
    unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked, round to nearest, no flush-to-zero, no denormals-are-zero */
    return saved;
}
static inline void float_state_restore(unsigned saved) { _mm_setcsr(saved); }
#elif defined(__aarch64__)
static inline unsigned long float_state_ieee(void)
{
    unsigned long saved;
    __asm__ volatile("mrs %0, fpcr\n\tmsr fpcr, xzr" : "=&r"(saved) : : "memory");
    return saved;
}
static inline void float_state_restore(unsigned long saved)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory");
}
#else
static inline unsigned long float_state_ieee(void) { return 0; }
static inline void float_state_restore(unsigned long saved) { (void)saved; }
#endif

/* Before a loop whose pointers are equal or do not overlap, so that it vectorises without checks of which. */
#if defined(__clang__)
#define ISA_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define ISA_INDEPENDENT _Pragma("GCC ivdep")
#endif

#define ISA_BODY static inline __attribute__((always_inline)) void

/* Define function NAME, its parameters and arguments in parentheses, from the always-inlined NAME_body.
 * The levels are functions of their own, so that no arithmetic moves across the state changes. */
#if defined(__x86_64__)
#define ISA_DISPATCH(name, parameters, arguments)                                                               \
    static __attribute__((noinline)) void name##_portable parameters { name##_body arguments; }                 \
    static __attribute__((noinline)) ISA_TARGET_AVX2 void name##_avx2 parameters { name##_body arguments; }     \
    static __attribute__((noinline)) ISA_TARGET_AVX512 void name##_avx512 parameters { name##_body arguments; } \
    void name parameters                                                                                        \
    {                                                                                                           \
        unsigned saved = float_state_ieee();                                                                    \
        (isa_level == ISA_AVX512 ? name##_avx512                                                                \
         : isa_level == ISA_AVX2 ? name##_avx2                                                                  \
                                 : name##_portable) arguments;                                                  \
        float_state_restore(saved);                                                                             \
    }
#else
#define ISA_DISPATCH(name, parameters, arguments)                                                               \
    static __attribute__((noinline)) void name##_portable parameters { name##_body arguments; }                 \
    void name parameters                                                                                        \
    {                                                                                                           \
        unsigned long saved = float_state_ieee();                                                               \
        name##_portable arguments;                                                                              \
        float_state_restore(saved);                                                                             \
    }
#endif

#endif
