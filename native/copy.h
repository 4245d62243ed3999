/* Copies of memory that are cut into requests, which the threads of a pool take: one thread reads far less than RAM
 * gives. */
#ifndef MEGATIER_COPY_H
#define MEGATIER_COPY_H

#include <stddef.h>

struct batch;

/* Copies num_bytes that do not overlap, in requests of at most request_bytes. NULL: no memory. */
struct batch *copy_batch(void *target, const void *source, size_t num_bytes, size_t request_bytes);

#endif
