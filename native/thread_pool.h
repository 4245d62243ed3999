/* Fixed threads over one bounded first-in first-out queue of requests. A batch is one submitted operation: a number of
 * requests, a counter of those that remain, the first failure, and the time span in which they ran. */
#ifndef MEGATIER_THREAD_POOL_H
#define MEGATIER_THREAD_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Why a request failed; `what` is "io", "short" or "checksum", a string constant. */
struct failure {
    const char *what;
    int code; /* errno, 0 when the system gave none */
    size_t segment;
    int64_t file_offset;
    uint64_t expected, found;
};

/* Runs one request on a worker thread; on false it has filled in the failure. */
typedef bool request_run(const void *request, struct failure *failure);

struct batch;
struct pool;

/* num_requests zeroed records of request_bytes each, for the caller to fill; held by the caller. NULL: no memory. */
struct batch *batch_new(size_t num_requests, size_t request_bytes, request_run *run);
void *batch_request(struct batch *batch, size_t index);
/* As batch_new, with shared_bytes of zeros that all requests may read and that live as long as they do. */
struct batch *batch_new_sharing(size_t num_requests, size_t request_bytes, size_t shared_bytes, request_run *run);
void *batch_shared(struct batch *batch);
/* Drop the caller's hold. A batch in flight lives on until its last request ended. */
void batch_release(struct batch *batch);
/* True once every request ended; false when timeout_ns passed before. Negative: no limit. */
bool batch_wait(struct batch *batch, int64_t timeout_ns);
/* Count every request as ended, of a batch that no pool was given. May be called again. */
void batch_end(struct batch *batch);
void batch_span(struct batch *batch, int64_t *start_ns, int64_t *end_ns);
/* True when a request failed. Requests of the batch that had not begun by then were skipped. */
bool batch_failure(struct batch *batch, struct failure *failure);

/* NULL with errno set when memory or threads are refused. */
struct pool *pool_new(size_t num_threads, size_t queue_depth_max);
size_t pool_num_threads(const struct pool *pool);
/* Queue every request, blocking while the queue is full. 0, or EPIPE after pool_close, or ECHILD in a forked child. */
int pool_submit(struct pool *pool, struct batch *batch);
/* Finish what was submitted, join the threads. May be called again, and from several threads. */
void pool_close(struct pool *pool);
/* Close and free. Nobody may use the pool any more. */
void pool_free(struct pool *pool);

int64_t monotonic_ns(void);

#endif
