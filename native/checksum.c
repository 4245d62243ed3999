#include "checksum.h"

#include "isa.h"

#include <string.h>

#define LANES 4
#define PREFETCH_BYTES 2048 /* a fifth faster from memory than the processor's own prefetching */
#define POLYNOMIAL 0x82f63b78u /* CRC32C (Castagnoli), bits reversed */

/* table[k][b]: the CRC of byte b followed by k zero bytes, so that eight lookups take eight bytes at once. */
static uint32_t table[8][256];

static __attribute__((constructor)) void table_fill(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        table[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 255];
}

static inline uint32_t word_portable(uint32_t crc, uint64_t word)
{
    word ^= crc;
    return table[7][word & 255] ^ table[6][word >> 8 & 255] ^ table[5][word >> 16 & 255] ^ table[4][word >> 24 & 255] ^
           table[3][word >> 32 & 255] ^ table[2][word >> 40 & 255] ^ table[1][word >> 48 & 255] ^ table[0][word >> 56];
}

static void lanes_portable(uint32_t lanes[LANES], const unsigned char *bytes, size_t num_words)
{
    for (size_t i = 0; i < num_words; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, 8);
        lanes[i % LANES] = word_portable(lanes[i % LANES], word);
    }
}

static uint32_t words_portable(uint32_t crc, const unsigned char *bytes, size_t num_words)
{
    for (size_t i = 0; i < num_words; i++) {
        uint64_t word;
        memcpy(&word, bytes + 8 * i, sizeof word);
        crc = word_portable(crc, word);
    }
    return crc;
}

/* An instruction that adds eight bytes to a CRC32C. */
#if defined(__x86_64__)
#define TARGET_CRC __attribute__((target("sse4.2")))
#define word_crc _mm_crc32_u64
#elif defined(__aarch64__)
#include <arm_acle.h>
#define TARGET_CRC __attribute__((target("+crc")))
#define word_crc(crc, word) __crc32cd((uint32_t)(crc), word)
#endif

#if defined(TARGET_CRC)
static TARGET_CRC void lanes_crc(uint32_t lanes[LANES], const unsigned char *bytes, size_t num_words)
{
    uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3], word[LANES];
    for (size_t i = 0; i < num_words; i += LANES) {
        __builtin_prefetch(bytes + 8 * i + PREFETCH_BYTES);
        memcpy(word, bytes + 8 * i, sizeof word);
        a = word_crc(a, word[0]);
        b = word_crc(b, word[1]);
        c = word_crc(c, word[2]);
        d = word_crc(d, word[3]);
    }
    lanes[0] = (uint32_t)a, lanes[1] = (uint32_t)b, lanes[2] = (uint32_t)c, lanes[3] = (uint32_t)d;
}

static TARGET_CRC uint32_t words_crc(uint32_t crc, const unsigned char *bytes, size_t num_words)
{
    uint64_t found = crc, word;
    for (size_t i = 0; i < num_words; i++) {
        __builtin_prefetch(bytes + 8 * i + PREFETCH_BYTES);
        memcpy(&word, bytes + 8 * i, sizeof word);
        found = word_crc(found, word);
    }
    return (uint32_t)found;
}
#else
#define lanes_crc lanes_portable
#define words_crc words_portable
#endif

static uint32_t bytes_portable(uint32_t crc, const unsigned char *bytes, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes; i++)
        crc = crc >> 8 ^ table[0][(crc ^ bytes[i]) & 255];
    return crc;
}

uint32_t checksum(const void *address, size_t num_bytes)
{
    const unsigned char *bytes = address;
    size_t tail_bytes = num_bytes % (8 * LANES), num_words = (num_bytes - tail_bytes) / 8;
    uint32_t lanes[LANES] = {~0u, ~0u, ~0u, ~0u};
    (isa_level == ISA_PORTABLE ? lanes_portable : lanes_crc)(lanes, bytes, num_words);

    unsigned char end[sizeof lanes + 8 * LANES + 8];
    uint64_t length = num_bytes;
    size_t end_bytes = sizeof lanes + tail_bytes + sizeof length;
    memcpy(end, lanes, sizeof lanes);
    if (tail_bytes)
        memcpy(end + sizeof lanes, bytes + 8 * num_words, tail_bytes);
    memcpy(end + sizeof lanes + tail_bytes, &length, sizeof length);
    return ~bytes_portable(~0u, end, end_bytes);
}

uint32_t crc32c(const void *address, size_t num_bytes)
{
    const unsigned char *bytes = address;
    size_t num_words = num_bytes / 8;
    uint32_t crc = (isa_level == ISA_PORTABLE ? words_portable : words_crc)(~0u, bytes, num_words);
    return ~bytes_portable(crc, bytes + 8 * num_words, num_bytes % 8);
}
